// Vectors of 2 * kLanes elements of 16 bits, for the kernels that use dot products of bf16.
//
//   load_elements(p), store_elements(p, v)   access memory with any alignment; with a Part, only the elements in it, and
//                                            loads set the others to 0.
//   part_of(count)                           the first `count` elements; `count` may be negative, or too large.
//   rounded(low, high)                       two Vec, rounded to bf16.
//   evens(a, b), odds(a, b)                  the elements at even, or odd, positions of a, then those of b.
//   interleaved_low(a, b), ..._high(a, b)    a0, b0, a1, b1, ... of the lower, or upper, halves.
//   dot_pairs(sums, a, b)                    adds a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1] to lane i of the sums.
#pragma once

#include <stdint.h>

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr int64_t kElements = 2 * kLanes;

#if defined(__AVX512F__)

typedef __m512i Elements;
typedef __mmask32 Part;
typedef __mmask32 Flags;  // one for each element

GPTLITE_INLINE Part part_of(int64_t count) {
  return count >= 32 ? ~Part{0} : count <= 0 ? 0 : (Part{1} << count) - 1;
}
GPTLITE_INLINE Elements load_elements(const void* p) { return _mm512_loadu_si512(p); }
GPTLITE_INLINE Elements load_elements(const void* p, Part part) { return _mm512_maskz_loadu_epi16(part, p); }
GPTLITE_INLINE void store_elements(void* p, Elements v) { _mm512_storeu_si512(p, v); }
GPTLITE_INLINE void store_elements(void* p, Elements v, Part part) { _mm512_mask_storeu_epi16(p, part, v); }
GPTLITE_INLINE void store_halves(uint16_t* low, uint16_t* high, Elements v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_castsi512_si256(v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_extracti64x4_epi64(v, 1));
}

// Returns the elements that are infinite or NaN.
GPTLITE_INLINE Flags not_finite(Elements v) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent);
}
GPTLITE_INLINE bool any(Flags flags) { return flags != 0; }

// Returns the indices first, first + step, first + 2 step, ...
GPTLITE_INLINE __m512i numbers(int first, int step) {
  alignas(64) uint16_t lanes[32];
  for (int lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<uint16_t>(first + step * lane);
  return _mm512_load_si512(lanes);
}
// Returns the indices a, b, a + 1, b + 1, ...
GPTLITE_INLINE __m512i alternating(int a, int b) {
  alignas(64) uint16_t lanes[32];
  for (int lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<uint16_t>((lane % 2 ? b : a) + lane / 2);
  return _mm512_load_si512(lanes);
}
GPTLITE_INLINE Elements evens(Elements a, Elements b) { return _mm512_permutex2var_epi16(a, numbers(0, 2), b); }
GPTLITE_INLINE Elements odds(Elements a, Elements b) { return _mm512_permutex2var_epi16(a, numbers(1, 2), b); }
GPTLITE_INLINE Elements interleaved_low(Elements a, Elements b) {
  return _mm512_permutex2var_epi16(a, alternating(0, 32), b);
}
GPTLITE_INLINE Elements interleaved_high(Elements a, Elements b) {
  return _mm512_permutex2var_epi16(a, alternating(16, 48), b);
}
// Returns v0, v16, v1, v17, ...
GPTLITE_INLINE Elements interleaved_halves(Elements v) { return _mm512_permutexvar_epi16(alternating(0, 16), v); }

GPTLITE_INLINE Elements rounded(Vec low, Vec high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
GPTLITE_INLINE Vec rounded(Vec v) { return from_bf16((__m256i)_mm512_cvtneps_pbh(v)); }

// Returns the pair of elements at p, in every lane.
GPTLITE_INLINE Elements broadcast_pair(const uint16_t* p) {
  int pair;
  memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}
GPTLITE_INLINE Vec dot_pairs(Vec sums, Elements a, Elements b) {
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

typedef uint16x8_t Elements;
typedef int64_t Part;
typedef uint16x8_t Flags;  // all bits of each element

GPTLITE_INLINE Part part_of(int64_t count) { return count; }
GPTLITE_INLINE Elements load_elements(const void* p) { return vld1q_u16(static_cast<const uint16_t*>(p)); }
GPTLITE_INLINE Elements load_elements(const void* p, Part part) {
  if (part >= kElements) return load_elements(p);
  uint16_t elements[kElements] = {};
  for (int64_t i = 0; i < part; ++i) elements[i] = static_cast<const uint16_t*>(p)[i];
  return load_elements(elements);
}
GPTLITE_INLINE void store_elements(void* p, Elements v) { vst1q_u16(static_cast<uint16_t*>(p), v); }
GPTLITE_INLINE void store_elements(void* p, Elements v, Part part) {
  if (part >= kElements) return store_elements(p, v);
  uint16_t elements[kElements];
  store_elements(elements, v);
  for (int64_t i = 0; i < part; ++i) static_cast<uint16_t*>(p)[i] = elements[i];
}
GPTLITE_INLINE void store_halves(uint16_t* low, uint16_t* high, Elements v) {
  vst1_u16(low, vget_low_u16(v));
  vst1_u16(high, vget_high_u16(v));
}

GPTLITE_INLINE Flags not_finite(Elements v) {
  const uint16x8_t exponent = vdupq_n_u16(0x7F80);
  return vceqq_u16(vandq_u16(v, exponent), exponent);
}
GPTLITE_INLINE bool any(Flags flags) { return vmaxvq_u16(flags) != 0; }

GPTLITE_INLINE Elements evens(Elements a, Elements b) { return vuzp1q_u16(a, b); }
GPTLITE_INLINE Elements odds(Elements a, Elements b) { return vuzp2q_u16(a, b); }
GPTLITE_INLINE Elements interleaved_low(Elements a, Elements b) { return vzip1q_u16(a, b); }
GPTLITE_INLINE Elements interleaved_high(Elements a, Elements b) { return vzip2q_u16(a, b); }
GPTLITE_INLINE Elements interleaved_halves(Elements v) { return vzip1q_u16(v, vextq_u16(v, v, 4)); }

GPTLITE_INLINE Elements rounded(Vec low, Vec high) {
  return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
GPTLITE_INLINE Vec rounded(Vec v) {
  const Bf16* const type = nullptr;
  return from_bits(type, to_bits(type, v));
}

GPTLITE_INLINE Elements broadcast_pair(const uint16_t* p) {
  uint32_t pair;
  memcpy(&pair, p, sizeof pair);
  return vreinterpretq_u16_u32(vdupq_n_u32(pair));
}
GPTLITE_INLINE Vec dot_pairs(Vec sums, Elements a, Elements b) {
  return vbfdotq_f32(sums, vreinterpretq_bf16_u16(a), vreinterpretq_bf16_u16(b));
}

#endif

}  // namespace GPTLITE_ISA
}  // namespace gptlite
