// Vectors of fp32 lanes for the instruction set that the file is compiled for: 16 lanes (AVX-512), 8 (AVX2, FMA, F16C)
// or 4 (any other). `Vec` is a vector type of the compiler, so + - * / and unary - work on it, also with a float.
//
//   load(p, lanes), store(p, v, lanes)   access fp32, bf16 or fp16 in memory (float, Bf16, Half), with any alignment.
//   lanes                                All{} or First{n}, the first n lanes, 0 < n < kLanes. Memory after them is not
//                                        accessed, and load sets the other lanes to 0.
//   for_columns<n>(width, body)          calls body(column, Index<k>, lanes) along a row; k < n selects an accumulator.
//   sum_columns<n>(width, sums, body)    computes n sums over a row.
//   with_dtype(dtype, f)                 returns f(T{}) with T = float, Bf16 or Half, or GPTLITE_UNSUPPORTED.
//
// All functions are static and always inlined: the linker could merge copies of a function, so that code for an older
// CPU calls one for a newer CPU. So kernels do not call templates of the standard library that may not be inlined.
#pragma once

#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "gptlite_kernels.h"

#if defined(__AVX2__) || defined(__AVX512F__)
// GCC 12 warns about undefined values in its own header.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define GPTLITE_INLINE static inline __attribute__((always_inline))
#define GPTLITE_LAMBDA __attribute__((always_inline))

namespace gptlite {
namespace GPTLITE_ISA {

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kLanes = 16;
typedef __m512 Vec;
typedef __mmask16 Mask;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
typedef __m256 Vec;
typedef int32_t Mask __attribute__((vector_size(32)));
#else
constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Mask __attribute__((vector_size(16)));
#endif
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

struct All {};
struct First {
  int count;
};

template <int value>
using Index = std::integral_constant<int, value>;

GPTLITE_INLINE Vec broadcast(float value) { return Vec{} + value; }
GPTLITE_INLINE Words words(Vec v) { return (Words)v; }
GPTLITE_INLINE Vec floats(Words w) { return (Vec)w; }

// ---- comparison and selection. max and min return b if either operand is NaN.

#if defined(__AVX512F__)

GPTLITE_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
GPTLITE_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
GPTLITE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
GPTLITE_INLINE Vec sqrt(Vec v) { return _mm512_sqrt_ps(v); }
GPTLITE_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
GPTLITE_INLINE Mask is_nan(Vec v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
GPTLITE_INLINE Mask at_least(Words a, Words b) { return _mm512_cmpge_epu32_mask((__m512i)a, (__m512i)b); }
GPTLITE_INLINE Vec select(Mask mask, Vec yes, Vec no) { return _mm512_mask_blend_ps(mask, no, yes); }
GPTLITE_INLINE Mask mask_of(All) { return 0xFFFF; }
GPTLITE_INLINE Mask mask_of(First first) { return static_cast<Mask>((1u << first.count) - 1); }

#else

GPTLITE_INLINE Vec select(Mask mask, Vec yes, Vec no) { return (Vec)(((Mask)yes & mask) | ((Mask)no & ~mask)); }
GPTLITE_INLINE Mask less(Vec a, Vec b) { return (Mask)(a < b); }
GPTLITE_INLINE Mask is_nan(Vec v) { return (Mask)(v != v); }
GPTLITE_INLINE Mask at_least(Words a, Words b) { return (Mask)(a >= b); }
GPTLITE_INLINE Mask mask_of(All) { return ~Mask{}; }

#if defined(__AVX2__)

GPTLITE_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
GPTLITE_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
GPTLITE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
GPTLITE_INLINE Vec sqrt(Vec v) { return _mm256_sqrt_ps(v); }
GPTLITE_INLINE Mask mask_of(First first) { return (Mask)(Mask{0, 1, 2, 3, 4, 5, 6, 7} < first.count); }

#else

GPTLITE_INLINE Vec max(Vec a, Vec b) { return select((Mask)(a > b), a, b); }
GPTLITE_INLINE Vec min(Vec a, Vec b) { return select((Mask)(a < b), a, b); }
GPTLITE_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
GPTLITE_INLINE Vec sqrt(Vec v) {
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = __builtin_sqrtf(v[lane]);
  return v;
}
GPTLITE_INLINE Mask mask_of(First first) { return (Mask)(Mask{0, 1, 2, 3} < first.count); }

#endif
#endif

GPTLITE_INLINE Vec abs(Vec v) { return floats(words(v) & 0x7FFFFFFFu); }

// Returns v with `fill` in the lanes past the end of the row.
GPTLITE_INLINE Vec fill_past(Vec v, All, float) { return v; }
GPTLITE_INLINE Vec fill_past(Vec v, First first, float fill) { return select(mask_of(first), v, broadcast(fill)); }
template <class Lanes>
GPTLITE_INLINE Vec zero_past(Vec v, Lanes lanes) {
  return fill_past(v, lanes, 0.0f);
}

GPTLITE_INLINE int lanes_in(All) { return kLanes; }
GPTLITE_INLINE int lanes_in(First first) { return first.count; }

// ---- sum and maximum over the lanes, by adding or comparing halves

#if defined(__AVX512F__)
GPTLITE_INLINE __m256 upper_half(Vec v) { return _mm512_extractf32x8_ps(v, 1); }
GPTLITE_INLINE __m256 lower_half(Vec v) { return _mm512_castps512_ps256(v); }
#endif

GPTLITE_INLINE float sum(Vec v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(lower_half(v), upper_half(v));
#else
  const __m256 eight = v;
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// Returns the maximum over the lanes. May ignore NaN, like max.
GPTLITE_INLINE float max_lane(Vec v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight = _mm256_max_ps(lower_half(v), upper_half(v));
#else
  const __m256 eight = v;
#endif
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
#endif
}

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

// Returns the mask of the bytes that are not 0.
GPTLITE_INLINE Mask load_bools(const uint8_t* p, All) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm_test_epi8_mask(bytes, bytes);
#elif defined(__AVX2__)
  return (Mask)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))) != 0;
#else
  return Mask{p[0], p[1], p[2], p[3]} != 0;
#endif
}
GPTLITE_INLINE Mask load_bools(const uint8_t* p, First first) {
  uint8_t lanes[kLanes] = {};
  for (int lane = 0; lane < first.count; ++lane) lanes[lane] = p[lane];
  return load_bools(lanes, All{});
}

// ---- elementary functions

// Returns exp(x) for x <= 88 within 1.2 ULP, exp(0) = 1, NaN for NaN, and 0 where the result would be subnormal: some
// CPUs are a hundred times slower with subnormals.
GPTLITE_INLINE Vec exp_below_88(Vec x) {
  const float log2e = 0x1.715476p+0f, ln2 = 0x1.62e4p-1f, ln2_rest = 0x1.7f7d1cp-20f, to_integer = 0x1.8p23f;
  const Vec least = broadcast(-87.33654f);
  const Vec shifted = fma(x, broadcast(log2e), broadcast(to_integer)), power = shifted - to_integer;
  const Vec r = fma(power, broadcast(-ln2_rest), fma(power, broadcast(-ln2), x));
  // (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2, by a minimax polynomial with an error of 3e-9 exp(r).
  Vec p = fma(broadcast(1.3814467e-3f), r, broadcast(8.3687804e-3f));
  p = fma(p, r, broadcast(4.1668394e-2f));
  p = fma(p, r, broadcast(1.6666520e-1f));
  p = fma(p, r, broadcast(4.9999993e-1f));
  p = fma(fma(p, r, broadcast(1.0f)), r, broadcast(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), p, power);
#else
  // 2^power as a product of two factors, so that both are normal numbers.
  const Mask whole = (Mask)(words(shifted) - float_to_bits(to_integer)), half = whole >> 1;
  const Vec found = p * (Vec)((half + 127) << 23) * (Vec)((whole - half + 127) << 23);
  return select(less(x, least), Vec{}, found);
#endif
}

// Returns exp(x) for any x, +inf if it overflows.
GPTLITE_INLINE Vec exp(Vec x) { return exp_below_88(min(broadcast(89.0f), x)); }

// Returns 1 / v with an error of at most 2 ULP, for 1e-30 < v < 1e30.
GPTLITE_INLINE Vec reciprocal(Vec v) {
#if defined(__AVX512F__)
  const Vec near = _mm512_rcp14_ps(v);
  return fma(near, fma(-v, near, broadcast(1.0f)), near);
#else
  return 1.0f / v;
#endif
}

// ---- loops over rows, and dispatch on the dtype

template <class Body, int... accumulators>
GPTLITE_INLINE int64_t full_columns(int64_t width, Body& body, std::integer_sequence<int, accumulators...>) {
  constexpr int64_t step = static_cast<int64_t>(sizeof...(accumulators)) * kLanes;
  int64_t column = 0;
  for (; column + step <= width; column += step) {
    (body(column + accumulators * kLanes, Index<accumulators>{}, All{}), ...);
  }
  return column;
}

template <int accumulators, class Body>
GPTLITE_INLINE void for_columns(int64_t width, Body body) {
  int64_t column = full_columns(width, body, std::make_integer_sequence<int, accumulators>{});
  if (accumulators > 1) {
    for (; column + kLanes <= width; column += kLanes) body(column, Index<0>{}, All{});
  }
  if (column < width) body(column, Index<0>{}, First{static_cast<int>(width - column)});
}

// Computes `count` sums over a row, in a fixed order and in blocks, so that the error does not grow with the width.
// body(column, lanes, terms) adds a vector to each of terms[0] to terms[count - 1], with 0 in lanes past the row.
template <int count, class Body>
GPTLITE_INLINE void sum_columns(int64_t width, float (&sums)[count], Body body) {
  constexpr int accumulators = count == 1 ? 4 : 2;
  constexpr int64_t block = 256 * kLanes;  // at most 128 terms are added in each lane
  Vec totals[count] = {};
  for (int64_t first = 0; first < width; first += block) {
    Vec terms[accumulators][count] = {};
    for_columns<accumulators>(width - first < block ? width - first : block,
                              [&](int64_t column, auto k, auto lanes) GPTLITE_LAMBDA {
                                body(first + column, lanes, terms[k.value]);
                              });
    for (int i = 0; i < count; ++i) {
      totals[i] += terms[0][i] + terms[1][i];
      if (accumulators == 4) totals[i] += terms[accumulators - 2][i] + terms[accumulators - 1][i];
    }
  }
  for (int i = 0; i < count; ++i) sums[i] = sum(totals[i]);
}

template <class Function>
GPTLITE_INLINE int with_dtype(int dtype, Function function) {
  switch (dtype) {
    case GPTLITE_FP32:
      return function(float{});
    case GPTLITE_BF16:
      return function(Bf16{});
    case GPTLITE_FP16:
      return function(Half{});
    default:
      return GPTLITE_UNSUPPORTED;
  }
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
