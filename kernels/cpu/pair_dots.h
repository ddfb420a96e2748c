// Products of 32 by 32 blocks of bf16 matrices, with the dot product instructions of AVX512-BF16 or of ARM's BF16. The
// lanes of a vector are columns of the product. An instruction multiplies and adds two consecutive elements along the
// depth in each lane.
#pragma once

#include <stdint.h>
#include <string.h>

#include "lanes_bf16.h"

namespace gptlite {
namespace GPTLITE_ISA {

class PairDots {
 public:
  // Computes c [32, 32] = a b, or c += a b if `add`. `depth`, the dimension that is summed over, is a multiple of 32.
  static void multiply(float* c, int64_t c_stride, const uint16_t* a, int64_t a_stride, const uint16_t* b,
                       int64_t b_stride, int64_t depth, bool add) {
    for (int64_t row = 0; row < 32; row += kRows) {
      multiply_rows(c + row * c_stride, c_stride, a + row * a_stride, a_stride, 32, b, b + 32, 2 * b_stride, depth, add);
    }
  }

  // Computes the same from packed operands. A tile has 16 rows of a, or columns of b, and a depth of 32. It is followed
  // by the tile of the next 32 in depth. The other 16 rows or columns start `other` elements later.
  static void multiply_packed(float* c, int64_t c_stride, const uint16_t* a, const uint16_t* b, int64_t other,
                              int64_t depth, bool add) {
    for (int64_t row = 0; row < 32; row += kRows) {
      const uint16_t* const rows = a + row / 16 * other + row % 16 * 32;
      multiply_rows(c + row * c_stride, c_stride, rows, 32, 512, b, b + other, 32, depth, add);
    }
  }

 private:
  // The part of c that is in registers at a time: kRows rows of kSides times 16 columns.
  static constexpr int kRows = kLanes == 16 ? 8 : 4, kSides = kLanes == 16 ? 2 : 1, kVectors = 16 / kLanes;

  // Computes kRows rows of c. The elements of a row of `a` come in runs of 32, which are `a_step` elements apart. b and
  // b_other are the pairs of the first and the last 16 columns.
  GPTLITE_INLINE void multiply_rows(float* c, int64_t c_stride, const uint16_t* a, int64_t a_stride, int64_t a_step,
                                    const uint16_t* b, const uint16_t* b_other, int64_t b_stride, int64_t depth,
                                    bool add) {
    const uint16_t* const sides[] = {b, b_other};
    for (int side = 0; side < 2; side += kSides) {
      multiply_columns(c + 16 * side, c_stride, a, a_stride, a_step, sides + side, b_stride, depth, add);
    }
  }

  GPTLITE_INLINE void multiply_columns(float* c, int64_t c_stride, const uint16_t* a, int64_t a_stride, int64_t a_step,
                                       const uint16_t* const* b, int64_t b_stride, int64_t depth, bool add) {
    constexpr int columns = kSides * kVectors;
    Vec sums[kRows][columns];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < columns; ++v) sums[row][v] = add ? load(c + row * c_stride + v * kLanes, All{}) : Vec{};
    }
    const uint16_t* right[kSides];
    for (int side = 0; side < kSides; ++side) right[side] = b[side];
    for (int64_t k = 0; k < depth; k += 32, a += a_step) {
      for (int64_t at = 0; at < 32; at += 2) {
        Elements pairs[columns];
#pragma GCC unroll 4
        for (int v = 0; v < columns; ++v) pairs[v] = load_elements(right[v / kVectors] + v % kVectors * kElements);
#pragma GCC unroll 2
        for (int side = 0; side < kSides; ++side) right[side] += b_stride;
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const Elements left = broadcast_pair(a + row * a_stride + at);
#pragma GCC unroll 4
          for (int v = 0; v < columns; ++v) sums[row][v] = dot_pairs(sums[row][v], left, pairs[v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < columns; ++v) store(c + row * c_stride + v * kLanes, sums[row][v], All{});
    }
  }
};

}  // namespace GPTLITE_ISA
}  // namespace gptlite
