// Matrix products of bf16 for attention_blocks.h, with sums in fp32. `Dot` multiplies blocks of 32 by 32: Tiles (AMX)
// or PairDots (AVX512-BF16, or BF16 of ARM). The depth is the dimension that a product sums over. Both need a left operand with rows
// contiguous along the depth, and a right operand in pairs along the depth: its element (depth, column) is at
// [depth / 2][column][depth % 2].
#pragma once

#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "attention_transpose.h"
#include "exp2.h"
#include "lanes_bf16.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

template <class Dot>
struct Bf16Math {
  using Element = uint16_t;
  using Unit = Dot;
  struct Left {
    const uint16_t* data;
    int64_t row_stride;
  };
  static constexpr int64_t kWidthStep = 32, kRowStep = 32, kQueryStep = 32, kDepthStep = 32;
  static constexpr bool kOneForm = false;

  static bool load_row(uint16_t* to, const Bf16* from, int64_t width, int64_t padded) {
    Flags flags{};
    for (int64_t column = 0; column < padded; column += kElements) {
      const Elements x = load_elements(from + column, part_of(width - column));
      flags |= not_finite(x);
      store_elements(to + column, x);
    }
    return !any(flags);
  }

  static void store_row(Bf16* to, const float* from, int64_t width, float scale) {
    const Vec factor = broadcast(scale);
    for (int64_t column = 0; column < width; column += kElements) {
      const Vec low = load(from + column, All{}) * factor, high = load(from + column + kLanes, All{}) * factor;
      store_elements(to + column, rounded(low, high), part_of(width - column));
    }
  }
  static float dot(const Bf16* a, const Bf16* b, int64_t width) {
    Vec total{};
    for (int64_t column = 0; column < width; column += kElements) {
      const Part part = part_of(width - column);
      total = dot_pairs(total, load_elements(a + column, part), load_elements(b + column, part));
    }
    return sum(total);
  }
  static Vec exp2(Vec x) { return gptlite::GPTLITE_ISA::exp2<4>(x); }

  // Transposes rows [count, width] to a right operand that sums over the width. Pairs of elements move as 32-bit words.
  static void transposed(uint16_t* to, int64_t stride, const uint16_t* rows, int64_t count, int64_t width) {
    transpose(reinterpret_cast<float*>(to), stride, reinterpret_cast<const float*>(rows), width / 2, count, width / 2);
  }

  static Left left(const uint16_t* rows, int64_t stride) { return {rows, stride}; }

  // Prepare other forms of rows [count, width]: as a left operand [width, count], and as a right operand that sums over
  // count.
  static void prepare_columns(uint16_t* to, int64_t stride, const uint16_t* rows, int64_t count, int64_t width,
                              float* spare) {
    transpose(spare, count, reinterpret_cast<const float*>(rows), width / 2, count, width / 2);
    for (int64_t pair = 0; pair < width / 2; ++pair) {
      for (int64_t row = 0; row < count; row += kElements) {
        const Elements a = load_elements(spare + pair * count + row);
        const Elements b = load_elements(spare + pair * count + row + kLanes);
        store_elements(to + 2 * pair * stride + row, evens(a, b));
        store_elements(to + (2 * pair + 1) * stride + row, odds(a, b));
      }
    }
  }
  static Left columns(const uint16_t* columns, int64_t stride, const uint16_t*, int64_t) { return {columns, stride}; }

  static void prepare_right(uint16_t* to, const uint16_t* rows, int64_t count, int64_t width) {
    for (int64_t row = 0; row < count; row += 2) {
      for (int64_t column = 0; column < width; column += kElements) {
        const Elements a = load_elements(rows + row * width + column);
        const Elements b = load_elements(rows + (row + 1) * width + column);
        uint16_t* pairs = to + row * width + 2 * column;
        store_elements(pairs, interleaved_low(a, b));
        store_elements(pairs + kElements, interleaved_high(a, b));
      }
    }
  }
  static const uint16_t* right(const uint16_t* right, const uint16_t*) { return right; }

  static void store_rows(uint16_t* to, int64_t stride, Vec first, Vec second) {
    store_halves(to, to + stride, rounded(first, second));
  }
  static void store_right(uint16_t* to, int64_t stride, int64_t row, int64_t column, Vec first, Vec second) {
    store_elements(to + row * stride + 2 * column, interleaved_halves(rounded(first, second)));
  }

  // Computes c [rows, columns] = a b, or c += a b if `add`. Rows, columns and depth are multiples of 32.
  static void multiply(float* c, int64_t c_stride, Left a, const uint16_t* b, int64_t b_stride, int64_t rows,
                       int64_t columns, int64_t depth, bool add) {
    for (int64_t row = 0; row < rows; row += 32) {
      for (int64_t column = 0; column < columns; column += 32) {
        Dot::multiply(c + row * c_stride + column, c_stride, a.data + row * a.row_stride, a.row_stride, b + 2 * column,
                      b_stride, depth, add);
      }
    }
  }
};

}  // namespace GPTLITE_ISA
}  // namespace gptlite
