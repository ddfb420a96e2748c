// Masks and permutation indices for AVX-512 vectors of 32 elements of 16 bits.
#pragma once

#include <stdint.h>

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// Returns the mask of the first `count` of 32 lanes. `count` may be out of the range 0 to 32.
GPTLITE_INLINE __mmask32 lanes(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
}
// Returns the indices first, first + step, first + 2 step, ...
GPTLITE_INLINE __m512i numbers(int first, int step) {
  alignas(64) uint16_t lanes[32];
  for (int lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<uint16_t>(first + step * lane);
  return _mm512_load_si512(lanes);
}
// Returns the indices a, b, a + 1, b + 1, ...
GPTLITE_INLINE __m512i interleaved(int a, int b) {
  alignas(64) uint16_t lanes[32];
  for (int lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<uint16_t>((lane % 2 ? b : a) + lane / 2);
  return _mm512_load_si512(lanes);
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
