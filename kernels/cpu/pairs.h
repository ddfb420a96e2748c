// Rows of interleaved pairs (a0, b0, a1, b1, ...) in memory, loaded as two vectors: the first numbers and the second
// ones.
//
//   load_pairs(p, lanes), store_pairs(p, pairs, lanes)   as load and store; `lanes` counts pairs.
#pragma once

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

struct Pairs {
  Vec first, second;
};

GPTLITE_INLINE Pairs operator+(Pairs a, Pairs b) { return Pairs{a.first + b.first, a.second + b.second}; }

// ---- two vectors of alternating lanes <-> pairs

#if defined(__AVX512F__)

GPTLITE_INLINE Pairs split(Vec low, Vec high) {
  const Words even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return Pairs{_mm512_permutex2var_ps(low, (__m512i)even, high), _mm512_permutex2var_ps(low, (__m512i)(even + 1u), high)};
}
GPTLITE_INLINE void join(Pairs pairs, Vec& low, Vec& high) {
  const Words order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  low = _mm512_permutex2var_ps(pairs.first, (__m512i)order, pairs.second);
  high = _mm512_permutex2var_ps(pairs.first, (__m512i)(order + 8u), pairs.second);
}

#elif defined(__AVX2__)

GPTLITE_INLINE Pairs split(Vec low, Vec high) {
  // AVX2 shuffles do not cross 128-bit halves, so the halves to be shuffled together are brought into one vector first.
  const Vec lower = _mm256_permute2f128_ps(low, high, 0x20), upper = _mm256_permute2f128_ps(low, high, 0x31);
  return Pairs{_mm256_shuffle_ps(lower, upper, 0x88), _mm256_shuffle_ps(lower, upper, 0xDD)};
}
GPTLITE_INLINE void join(Pairs pairs, Vec& low, Vec& high) {
  const Vec lower = _mm256_unpacklo_ps(pairs.first, pairs.second);
  const Vec upper = _mm256_unpackhi_ps(pairs.first, pairs.second);
  low = _mm256_permute2f128_ps(lower, upper, 0x20);
  high = _mm256_permute2f128_ps(lower, upper, 0x31);
}

#elif defined(__aarch64__)

GPTLITE_INLINE Pairs split(Vec low, Vec high) { return Pairs{vuzp1q_f32(low, high), vuzp2q_f32(low, high)}; }
GPTLITE_INLINE void join(Pairs pairs, Vec& low, Vec& high) {
  low = vzip1q_f32(pairs.first, pairs.second);
  high = vzip2q_f32(pairs.first, pairs.second);
}

#else

GPTLITE_INLINE Pairs split(Vec low, Vec high) {
  return Pairs{Vec{low[0], low[2], high[0], high[2]}, Vec{low[1], low[3], high[1], high[3]}};
}
GPTLITE_INLINE void join(Pairs pairs, Vec& low, Vec& high) {
  const Vec a = pairs.first, b = pairs.second;
  low = Vec{a[0], b[0], a[1], b[1]};
  high = Vec{a[2], b[2], a[3], b[3]};
}

#endif

// ---- pairs in memory

template <class T>
GPTLITE_INLINE Pairs load_pairs(const T* p, All) {
  return split(load(p, All{}), load(p + kLanes, All{}));
}
template <class T>
GPTLITE_INLINE void store_pairs(T* p, Pairs pairs, All) {
  Vec low, high;
  join(pairs, low, high);
  store(p, low, All{});
  store(p + kLanes, high, All{});
}

// A pair of bf16 is one 32-bit word. Its halves are separated by a shift and a mask, without a shuffle.
GPTLITE_INLINE Pairs load_pairs(const Bf16* p, All) {
  Words both;
  memcpy(&both, p, sizeof both);
  return Pairs{floats(both << 16), floats(both & 0xFFFF0000u)};
}
#if defined(__AVX512BF16__)
GPTLITE_INLINE void store_pairs(Bf16* p, Pairs pairs, All) {
  const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(pairs.second, pairs.first);
  const Words order = Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001u + 0x100000u;
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16((__m512i)order, apart));
}
#elif defined(__aarch64__)
GPTLITE_INLINE void store_pairs(Bf16* p, Pairs pairs, All) {
  vst2_u16(&p->bits, uint16x4x2_t{{to_bits(p, pairs.first), to_bits(p, pairs.second)}});
}
#else
// Rounds to bf16 in the upper half of each word. The lower half is undefined.
GPTLITE_INLINE Words rounded_bf16(Vec v) {
  const Words bits = words(v);
  return words(select(is_nan(v), floats(bits | 0x400000u), floats(bits + 0x7FFFu + ((bits >> 16) & 1u))));
}
GPTLITE_INLINE void store_pairs(Bf16* p, Pairs pairs, All) {
  const Words both = (rounded_bf16(pairs.first) >> 16) | (rounded_bf16(pairs.second) & 0xFFFF0000u);
  memcpy(p, &both, sizeof both);
}
#endif

template <class T>
GPTLITE_INLINE Pairs load_pairs(const T* p, First first) {
  T lanes[2 * kLanes] = {};
  for (int lane = 0; lane < 2 * first.count; ++lane) lanes[lane] = p[lane];
  return load_pairs(lanes, All{});
}
template <class T>
GPTLITE_INLINE void store_pairs(T* p, Pairs pairs, First first) {
  T lanes[2 * kLanes];
  store_pairs(lanes, pairs, All{});
  for (int lane = 0; lane < 2 * first.count; ++lane) p[lane] = lanes[lane];
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
