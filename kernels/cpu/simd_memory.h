// Conversion of elements to and from fp32, and loads and stores of vectors. Included by simd.h.
#pragma once

#include "simd_vector.h"

namespace gptlite {
namespace GPTLITE_ISA {

// ---- conversion of one element to and from fp32

GPTLITE_INLINE float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
GPTLITE_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

GPTLITE_INLINE float to_float(float value) { return value; }
GPTLITE_INLINE float to_float(Bf16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }
GPTLITE_INLINE float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return bits_to_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  // The exponent biases of fp16 and fp32 differ by 112. A multiplication by 2^112 corrects that, also for subnormals.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}

template <class T>
T from_float(float value);
template <>
GPTLITE_LAMBDA inline float from_float<float>(float value) {
  return value;
}
template <>
GPTLITE_LAMBDA inline Bf16 from_float<Bf16>(float value) {
  const uint32_t bits = float_to_bits(value);
  if (value != value) return Bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return Bf16{static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
GPTLITE_LAMBDA inline Half from_float<Half>(float value) {
  const uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return Half{static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu))};
  if (magnitude >= 0x477FF000u) return Half{static_cast<uint16_t>(sign | 0x7C00u)};
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the rounded number, as a multiple of 2^-24, in the low bits.
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return Half{static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3F000000u))};
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u);
  return Half{static_cast<uint16_t>(sign | (rounded >> 13))};
}

template <>
GPTLITE_LAMBDA inline E5m2 from_float<E5m2>(float value) {
  return E5m2{static_cast<uint8_t>(fp8_bits<E5m2>(value))};
}

// ---- loads and stores of vectors

#if defined(__AVX512F__)

// The conversions use a permutation, because shifting and narrowing would take three instructions.
GPTLITE_INLINE Vec from_bf16(__m256i v) {
  const Words upper = Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} << 16;
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, (__m512i)upper, _mm512_castsi256_si512(v)));
}
#if defined(__AVX512BF16__)
GPTLITE_INLINE __m256i to_bf16(Vec v) { return (__m256i)_mm512_cvtneps_pbh(v); }  // flushes subnormals to 0
#else
GPTLITE_INLINE __m256i to_bf16(Vec v) {
  const Words bits = words(v), odd_words = {0x00030001, 0x00070005, 0x000B0009, 0x000F000D, 0x00130011, 0x00170015,
                                            0x001B0019, 0x001F001D};
  const __m512i below = (__m512i)(bits + 0x7FFFu);
  const __mmask16 odd = _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(0x10000));
  const __m512i rounded = _mm512_mask_add_epi32(below, odd, below, _mm512_set1_epi32(1));
  const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan(v), (__m512i)bits, _mm512_set1_epi32(0x400000));
  return _mm512_castsi512_si256(_mm512_permutexvar_epi16((__m512i)odd_words, kept));
}
#endif

GPTLITE_INLINE Vec load(const float* p, All) { return _mm512_loadu_ps(p); }
GPTLITE_INLINE Vec load(const Bf16* p, All) {
  return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
GPTLITE_INLINE Vec load(const Half* p, All) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
GPTLITE_INLINE Vec load(const float* p, First first) { return _mm512_maskz_loadu_ps(mask_of(first), p); }
GPTLITE_INLINE Vec load(const Bf16* p, First first) {
  return from_bf16(_mm256_maskz_loadu_epi16(mask_of(first), p));
}
GPTLITE_INLINE Vec load(const Half* p, First first) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask_of(first), p));
}

GPTLITE_INLINE __m256i to_half(Vec v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

GPTLITE_INLINE void store(float* p, Vec v, All) { _mm512_storeu_ps(p, v); }
GPTLITE_INLINE void store(Bf16* p, Vec v, All) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v)); }
GPTLITE_INLINE void store(Half* p, Vec v, All) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_half(v)); }
GPTLITE_INLINE void store(float* p, Vec v, First first) { _mm512_mask_storeu_ps(p, mask_of(first), v); }
GPTLITE_INLINE void store(Bf16* p, Vec v, First first) { _mm256_mask_storeu_epi16(p, mask_of(first), to_bf16(v)); }
GPTLITE_INLINE void store(Half* p, Vec v, First first) { _mm256_mask_storeu_epi16(p, mask_of(first), to_half(v)); }

#else

#if defined(__AVX2__)

GPTLITE_INLINE Vec load(const float* p, All) { return _mm256_loadu_ps(p); }
GPTLITE_INLINE Vec load(const Bf16* p, All) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
GPTLITE_INLINE Vec load(const Half* p, All) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

GPTLITE_INLINE void store(float* p, Vec v, All) { _mm256_storeu_ps(p, v); }
GPTLITE_INLINE void store(Bf16* p, Vec v, All) {
  const Words bits = words(v), rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const Words kept = words(select(is_nan(v), floats(bits | 0x400000u), floats(rounded))) >> 16;
  const __m256i pairs = _mm256_packus_epi32((__m256i)kept, (__m256i)kept);
  const __m256i together = _mm256_permute4x64_epi64(pairs, 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(together));
}
GPTLITE_INLINE void store(Half* p, Vec v, All) {
  const __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
}

#elif defined(__aarch64__)

GPTLITE_INLINE const uint16_t* bits_of(const Bf16* p) { return &p->bits; }
GPTLITE_INLINE const uint16_t* bits_of(const Half* p) { return &p->bits; }

GPTLITE_INLINE Vec from_bits(const Bf16*, uint16x4_t bits) { return vreinterpretq_f32_u32(vshll_n_u16(bits, 16)); }
GPTLITE_INLINE Vec from_bits(const Half*, uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }

GPTLITE_INLINE uint16x4_t to_bits(const Half*, Vec v) { return vreinterpret_u16_f16(vcvt_f16_f32(v)); }
GPTLITE_INLINE uint16x4_t to_bits(const Bf16*, Vec v) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return vreinterpret_u16_bf16(vcvt_bf16_f32(v));
#else
  const Words bits = words(v), rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  return vshrn_n_u32(vbslq_u32((uint32x4_t)is_nan(v), bits | 0x400000u, rounded), 16);
#endif
}

GPTLITE_INLINE Vec load(const float* p, All) { return vld1q_f32(p); }
GPTLITE_INLINE void store(float* p, Vec v, All) { vst1q_f32(p, v); }
template <class T>
GPTLITE_INLINE Vec load(const T* p, All) {
  return from_bits(p, vld1_u16(bits_of(p)));
}
template <class T>
GPTLITE_INLINE void store(T* p, Vec v, All) {
  vst1_u16(&p->bits, to_bits(p, v));
}

// The first one to three lanes, one by one: a vector that is loaded from lanes in memory would have to wait for them.
// As functions: a row has one of these at its end, and inlining them takes a quarter of the compilation time.
#define GPTLITE_TAIL [[maybe_unused]] static __attribute__((noinline))
GPTLITE_TAIL Vec load(const float* p, First first) {
  Vec v = vld1q_lane_f32(p, Vec{}, 0);
  if (first.count > 1) v = vld1q_lane_f32(p + 1, v, 1);
  if (first.count > 2) v = vld1q_lane_f32(p + 2, v, 2);
  return v;
}
GPTLITE_TAIL void store(float* p, Vec v, First first) {
  vst1q_lane_f32(p, v, 0);
  if (first.count > 1) vst1q_lane_f32(p + 1, v, 1);
  if (first.count > 2) vst1q_lane_f32(p + 2, v, 2);
}
template <class T>
GPTLITE_TAIL Vec load(const T* p, First first) {
  uint16x4_t bits = vld1_lane_u16(bits_of(p), uint16x4_t{}, 0);
  if (first.count > 1) bits = vld1_lane_u16(bits_of(p + 1), bits, 1);
  if (first.count > 2) bits = vld1_lane_u16(bits_of(p + 2), bits, 2);
  return from_bits(p, bits);
}
template <class T>
GPTLITE_TAIL void store(T* p, Vec v, First first) {
  const uint16x4_t bits = to_bits(p, v);
  vst1_lane_u16(&p->bits, bits, 0);
  if (first.count > 1) vst1_lane_u16(&p[1].bits, bits, 1);
  if (first.count > 2) vst1_lane_u16(&p[2].bits, bits, 2);
}

#else

GPTLITE_INLINE Vec load(const float* p, All) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
GPTLITE_INLINE void store(float* p, Vec v, All) { memcpy(p, &v, sizeof v); }
template <class T>
GPTLITE_INLINE Vec load(const T* p, All) {
  return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
template <class T>
GPTLITE_INLINE void store(T* p, Vec v, All) {
  for (int lane = 0; lane < kLanes; ++lane) p[lane] = from_float<T>(v[lane]);
}

#endif

#if !defined(__aarch64__)
template <class T>
GPTLITE_INLINE Vec load(const T* p, First first) {
  T lanes[kLanes] = {};
  for (int lane = 0; lane < first.count; ++lane) lanes[lane] = p[lane];
  return load(lanes, All{});
}
template <class T>
GPTLITE_INLINE void store(T* p, Vec v, First first) {
  T lanes[kLanes];
  store(lanes, v, All{});
  for (int lane = 0; lane < first.count; ++lane) p[lane] = lanes[lane];
}
#endif

#endif

GPTLITE_INLINE void store(E5m2* p, Vec v, First first) {
  for (int lane = 0; lane < first.count; ++lane) p[lane] = from_float<E5m2>(v[lane]);
}
GPTLITE_INLINE void store(E5m2* p, Vec v, All) { store(p, v, First{kLanes}); }

// Returns the mask of the bytes that are not 0.
GPTLITE_INLINE Mask load_bools(const uint8_t* p, All) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm_test_epi8_mask(bytes, bytes);
#elif defined(__AVX2__)
  return (Mask)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))) != 0;
#elif defined(__aarch64__)
  uint32_t bytes;
  memcpy(&bytes, p, sizeof bytes);
  return (Mask)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes)))) != 0;
#else
  return Mask{p[0], p[1], p[2], p[3]} != 0;
#endif
}
GPTLITE_INLINE Mask load_bools(const uint8_t* p, First first) {
  uint8_t lanes[kLanes] = {};
  for (int lane = 0; lane < first.count; ++lane) lanes[lane] = p[lane];
  return load_bools(lanes, All{});
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
