// Vectorized random words of philox.h (Philox4x32-10) for consecutive columns, and dropout with these words.
#pragma once

#include "philox.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// Random words of 2 * kLanes columns, in the order of the columns.
struct RandomWords {
  Words half[2];
};

#if defined(__AVX2__) || defined(__aarch64__)

typedef uint64_t Wide __attribute__((vector_size(4 * kLanes)));  // one counter per lane, in the lower half

#if defined(__AVX512F__)
GPTLITE_INLINE Wide product(Wide counters, uint32_t by) {
  return (Wide)_mm512_mul_epu32((__m512i)counters, _mm512_set1_epi64(by));
}
GPTLITE_INLINE Wide first_groups(int64_t group) { return Wide{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<uint64_t>(group); }
// Interleaves the 64-bit lanes of a and b.
GPTLITE_INLINE RandomWords interleaved(Wide a, Wide b) {
  const __m512i lower = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i upper = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  return RandomWords{{(Words)_mm512_permutex2var_epi64((__m512i)a, lower, (__m512i)b),
                      (Words)_mm512_permutex2var_epi64((__m512i)a, upper, (__m512i)b)}};
}
#elif defined(__aarch64__)
GPTLITE_INLINE Wide product(Wide counters, uint32_t by) { return vmull_n_u32(vmovn_u64(counters), by); }
GPTLITE_INLINE Wide first_groups(int64_t group) { return Wide{0, 1} + static_cast<uint64_t>(group); }
GPTLITE_INLINE RandomWords interleaved(Wide a, Wide b) {
  return RandomWords{{(Words)vzip1q_u64(a, b), (Words)vzip2q_u64(a, b)}};
}
#else
GPTLITE_INLINE Wide product(Wide counters, uint32_t by) {
  return (Wide)_mm256_mul_epu32((__m256i)counters, _mm256_set1_epi64x(by));
}
GPTLITE_INLINE Wide first_groups(int64_t group) { return Wide{0, 1, 2, 3} + static_cast<uint64_t>(group); }
GPTLITE_INLINE RandomWords interleaved(Wide a, Wide b) {
  const __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
  const __m256i odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
  return RandomWords{{(Words)_mm256_permute2x128_si256(even, odd, 0x20),
                      (Words)_mm256_permute2x128_si256(even, odd, 0x31)}};
}
#endif

// The lower half of each 64-bit lane is a word of a Philox counter. The upper half holds leftovers of the products,
// which do no harm, because the multiplication reads only lower halves.
GPTLITE_INLINE RandomWords random_words(const DropoutRow& row, int64_t column) {
  Wide counter0 = first_groups(column / 4), counter1 = Wide{} + row.position, counter2 = Wide{} + row.sample;
  Wide counter3 = Wide{} + row.head;
  uint32_t key0 = row.seed, key1 = row.site;
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Wide product0 = product(counter0, kPhiloxMultiplier0), product1 = product(counter2, kPhiloxMultiplier1);
    counter0 = (product1 >> 32) ^ counter1 ^ (Wide{} + key0);
    counter2 = (product0 >> 32) ^ counter3 ^ (Wide{} + key1);
    counter1 = product1;
    counter3 = product0;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  const uint64_t lower = 0xFFFFFFFFu;
  return interleaved((counter0 & lower) | (counter1 << 32), (counter2 & lower) | (counter3 << 32));
}

#else

GPTLITE_INLINE RandomWords random_words(const DropoutRow& row, int64_t column) {
  const PhiloxWords a = dropout_words(row, column / 4), b = dropout_words(row, column / 4 + 1);
  return RandomWords{{Words{a.word[0], a.word[1], a.word[2], a.word[3]},
                      Words{b.word[0], b.word[1], b.word[2], b.word[3]}}};
}

#endif

// Returns v * scale where the random word is at least `threshold`, else 0, even for NaN or infinity.
GPTLITE_INLINE Vec dropped_out(Vec v, Words random, uint32_t threshold, float scale) {
  return select(at_least(random, Words{} + threshold), v * scale, Vec{});
}

// Calls body(column, random words, lanes) over the columns of a row.
template <class Body>
GPTLITE_INLINE void for_random_columns(const DropoutRow& row, int64_t width, Body body) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= width; column += 2 * kLanes) {
    const RandomWords random = random_words(row, column);
    body(column, random.half[0], All{});
    body(column + kLanes, random.half[1], All{});
  }
  if (column == width) return;
  const RandomWords random = random_words(row, column);
  for_columns<1>(width - column, [&](int64_t past, auto, auto lanes) GPTLITE_LAMBDA {
    body(column + past, random.half[past / kLanes], lanes);
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
