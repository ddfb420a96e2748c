// Transposition of matrices of 32-bit words, in squares of kLanes by kLanes.
#pragma once

#include <stdint.h>

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

#if defined(__AVX512F__)

// Transposes a square of 16 by 16: interleaves pairs of rows, then groups of four rows within each 128 bits, then
// exchanges the 128-bit quarters.
GPTLITE_INLINE void transpose_square(float* to, int64_t to_stride, const float* from, int64_t from_stride) {
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(from + i * from_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int four = i / 2 * 4, half = i % 2;  // a[four + c]: column c of each quarter of rows four to four + 3
    const __m512d low = _mm512_castps_pd(b[four + half]), high = _mm512_castps_pd(b[four + half + 2]);
    a[four + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
    a[four + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 even_low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_storeu_ps(to + c * to_stride, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
    _mm512_storeu_ps(to + (4 + c) * to_stride, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_ps(to + (8 + c) * to_stride, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
    _mm512_storeu_ps(to + (12 + c) * to_stride, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
  }
}

#elif defined(__AVX2__)

GPTLITE_INLINE void transpose_square(float* to, int64_t to_stride, const float* from, int64_t from_stride) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(from + i * from_stride);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int four = i / 2 * 4, half = i % 2;
    a[four + 2 * half] = _mm256_shuffle_ps(b[four + half], b[four + half + 2], 0x44);
    a[four + 2 * half + 1] = _mm256_shuffle_ps(b[four + half], b[four + half + 2], 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(to + c * to_stride, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
    _mm256_storeu_ps(to + (4 + c) * to_stride, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
  }
}

#elif defined(__aarch64__)

GPTLITE_INLINE void transpose_square(float* to, int64_t to_stride, const float* from, int64_t from_stride) {
  Vec a[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) a[i] = vld1q_f32(from + i * from_stride);
  const Vec even_low = vtrn1q_f32(a[0], a[1]), odd_low = vtrn2q_f32(a[0], a[1]);
  const Vec even_high = vtrn1q_f32(a[2], a[3]), odd_high = vtrn2q_f32(a[2], a[3]);
  const auto store_pair = [=](int64_t column, Vec low, Vec high) GPTLITE_LAMBDA {
    const float64x2_t first = vreinterpretq_f64_f32(low), second = vreinterpretq_f64_f32(high);
    vst1q_f32(to + column * to_stride, vreinterpretq_f32_f64(vzip1q_f64(first, second)));
    vst1q_f32(to + (column + 2) * to_stride, vreinterpretq_f32_f64(vzip2q_f64(first, second)));
  };
  store_pair(0, even_low, even_high);
  store_pair(1, odd_low, odd_high);
}

#else

GPTLITE_INLINE void transpose_square(float* to, int64_t to_stride, const float* from, int64_t from_stride) {
  for (int column = 0; column < kLanes; ++column) {
    for (int row = 0; row < kLanes; ++row) to[column * to_stride + row] = from[row * from_stride + column];
  }
}

#endif

// Computes to[column][row] = from[row][column]. rows and columns are multiples of kLanes.
static inline void transpose(float* to, int64_t to_stride, const float* from, int64_t from_stride, int64_t rows,
                             int64_t columns) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    for (int64_t row = 0; row < rows; row += kLanes) {
      transpose_square(to + column * to_stride + row, to_stride, from + row * from_stride + column, from_stride);
    }
  }
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
