// Matrix products of bf16 for attention_blocks.h, with sums in fp32. `Dot` multiplies blocks of 32 by 32: Tiles (AMX)
// or PairDots (AVX512-BF16). The depth is the dimension that a product sums over. Both need a left operand with rows
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
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    __mmask32 not_finite = 0;
    for (int64_t column = 0; column < padded; column += 32) {
      const __m512i x = _mm512_maskz_loadu_epi16(lanes(width - column), from + column);
      not_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
      _mm512_storeu_si512(to + column, x);
    }
    return not_finite == 0;
  }

  static void store_row(Bf16* to, const float* from, int64_t width, float scale) {
    const Vec factor = broadcast(scale);
    for (int64_t column = 0; column < width; column += 32) {
      const Vec low = load(from + column, All{}) * factor, high = load(from + column + 16, All{}) * factor;
      _mm512_mask_storeu_epi16(to + column, lanes(width - column), (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
  static float dot(const Bf16* a, const Bf16* b, int64_t width) {
    Vec total{};
    for (int64_t column = 0; column < width; column += 32) {
      const __mmask32 mask = lanes(width - column);
      total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_maskz_loadu_epi16(mask, a + column),
                               (__m512bh)_mm512_maskz_loadu_epi16(mask, b + column));
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
    const __m512i even = numbers(0, 2), odd = numbers(1, 2);
    for (int64_t pair = 0; pair < width / 2; ++pair) {
      for (int64_t row = 0; row < count; row += 32) {
        const __m512i a = _mm512_loadu_si512(spare + pair * count + row);
        const __m512i b = _mm512_loadu_si512(spare + pair * count + row + 16);
        _mm512_storeu_si512(to + 2 * pair * stride + row, _mm512_permutex2var_epi16(a, even, b));
        _mm512_storeu_si512(to + (2 * pair + 1) * stride + row, _mm512_permutex2var_epi16(a, odd, b));
      }
    }
  }
  static Left columns(const uint16_t* columns, int64_t stride, const uint16_t*, int64_t) { return {columns, stride}; }

  static void prepare_right(uint16_t* to, const uint16_t* rows, int64_t count, int64_t width) {
    const __m512i low = interleaved(0, 32), high = interleaved(16, 48);
    for (int64_t row = 0; row < count; row += 2) {
      for (int64_t column = 0; column < width; column += 32) {
        const __m512i a = _mm512_loadu_si512(rows + row * width + column);
        const __m512i b = _mm512_loadu_si512(rows + (row + 1) * width + column);
        uint16_t* pairs = to + row * width + 2 * column;
        _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(pairs + 32, _mm512_permutex2var_epi16(a, high, b));
      }
    }
  }
  static const uint16_t* right(const uint16_t* right, const uint16_t*) { return right; }

  static void store_rows(uint16_t* to, int64_t stride, Vec first, Vec second) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + stride), _mm512_extracti64x4_epi64(both, 1));
  }
  static void store_right(uint16_t* to, int64_t stride, int64_t row, int64_t column, Vec first, Vec second) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    _mm512_storeu_si512(to + row * stride + 2 * column, _mm512_permutexvar_epi16(interleaved(0, 16), both));
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
