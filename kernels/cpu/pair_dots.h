// Products of 32 by 32 blocks of bf16 matrices, with the dot product instruction of AVX512-BF16. The lanes of a vector
// are columns of the product. An instruction multiplies and adds two consecutive elements along the depth in each lane.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

namespace gptlite {
namespace avx512_bf16 {

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
  static constexpr int kRows = 8;

  // Computes kRows rows of c. The elements of a row of `a` come in runs of 32, which are `a_step` elements apart. b and
  // b_other are the pairs of the first and the last 16 columns.
  GPTLITE_INLINE void multiply_rows(float* c, int64_t c_stride, const uint16_t* a, int64_t a_stride, int64_t a_step,
                                    const uint16_t* b, const uint16_t* b_other, int64_t b_stride, int64_t depth,
                                    bool add) {
    __m512 sums[kRows][2];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      sums[row][0] = add ? _mm512_loadu_ps(c + row * c_stride) : _mm512_setzero_ps();
      sums[row][1] = add ? _mm512_loadu_ps(c + row * c_stride + 16) : _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < depth; k += 32, a += a_step) {
      for (int64_t at = 0; at < 32; at += 2, b += b_stride, b_other += b_stride) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(b), second = (__m512bh)_mm512_loadu_si512(b_other);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          int pair;
          memcpy(&pair, a + row * a_stride + at, sizeof pair);
          const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
          sums[row][0] = _mm512_dpbf16_ps(sums[row][0], left, first);
          sums[row][1] = _mm512_dpbf16_ps(sums[row][1], left, second);
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      _mm512_storeu_ps(c + row * c_stride, sums[row][0]);
      _mm512_storeu_ps(c + row * c_stride + 16, sums[row][1]);
    }
  }
};

}  // namespace avx512_bf16
}  // namespace gptlite
