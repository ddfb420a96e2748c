// Vectors of 32 numbers of 16 bits: masks, and the orders that permutations take.
#pragma once

#include <stdint.h>

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// The first `count` of 32.
GPTLITE_INLINE __mmask32 lanes(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
}
// first, first + step, ...
GPTLITE_INLINE __m512i numbers(int first, int step) {
  alignas(64) uint16_t lanes[32];
  for (int lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<uint16_t>(first + step * lane);
  return _mm512_load_si512(lanes);
}
// a, b, a + 1, b + 1, ...
GPTLITE_INLINE __m512i interleaved(int a, int b) {
  alignas(64) uint16_t lanes[32];
  for (int lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<uint16_t>((lane % 2 ? b : a) + lane / 2);
  return _mm512_load_si512(lanes);
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
