// Vectors of fp32 lanes: types, comparison, selection, and sums and maxima over the lanes. Included by simd.h.
#pragma once

#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "fp8.h"
#include "gptlite_kernels.h"

#if defined(__AVX2__) || defined(__AVX512F__)
// GCC 12 warns about undefined values in its own header.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
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

#elif defined(__aarch64__)

// FMAX and FMAXNM treat NaN in other ways, so these compare and select.
GPTLITE_INLINE Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
GPTLITE_INLINE Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
GPTLITE_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
GPTLITE_INLINE Vec sqrt(Vec v) { return vsqrtq_f32(v); }
GPTLITE_INLINE Mask mask_of(First first) { return (Mask)(Mask{0, 1, 2, 3} < first.count); }

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
#elif defined(__aarch64__)
  return vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)));
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
#elif defined(__aarch64__)
  return vmaxnmvq_f32(v);
#else
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
#endif
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
