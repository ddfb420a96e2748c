// Absolute maximum (amax) of a tensor that a kernel has written, as the scale of an fp8 tensor needs it.
#pragma once

#include <string.h>

#include "parallel.h"
#include "simd_memory.h"

namespace gptlite {
namespace GPTLITE_ISA {

// Raises amax[0] to the largest |x|; does nothing if amax is NULL. Compares bit patterns, so that NaN is above infinity.
template <class T>
static inline void raise_amax(float* amax, const void* x, int64_t count, const void* context) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  if (amax == nullptr) return;
  const char* const data = static_cast<const char*>(x);
  parallel(context, count, kTaskElements, [&](int64_t first, int64_t last) {
    Bits largest = 0;
    for (int64_t i = first; i < last; ++i) {
      Bits bits;
      memcpy(&bits, data + i * sizeof bits, sizeof bits);
      bits &= static_cast<Bits>(~Bits{0}) >> 1;
      largest = bits > largest ? bits : largest;
    }
    T value;
    memcpy(&value, &largest, sizeof value);
    const uint32_t mine = float_to_bits(to_float(value));
    uint32_t* const shared = reinterpret_cast<uint32_t*>(amax);
    uint32_t seen = __atomic_load_n(shared, __ATOMIC_RELAXED);
    while (mine > seen &&
           !__atomic_compare_exchange_n(shared, &seen, mine, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
