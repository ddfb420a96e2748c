// Absolute maximum (amax) of the elements that a kernel writes, from which the scale of the tensor in fp8 follows.
#pragma once

#include "dtype.cuh"
#include "reduce.cuh"

namespace gptlite {

// Returns the larger 16-bit integer in each half.
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b) {
#ifdef GPTLITE_EMU
  return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
#else
  return __vmaxu2(a, b);
#endif
}

// The amax of a thread's elements so far, and where that of the tensor goes, or NULL. Compares bit patterns, so that NaN
// is above infinity. For 16-bit elements, each half of `bits` has its own maximum.
template <typename T>
struct Amax {
  float* at;
  uint32_t bits = 0;

  __device__ __forceinline__ explicit Amax(float* at_) : at(at_) {}

  template <int N>
  __device__ __forceinline__ void see(const Pack<T, N>& pack) {
    if (sizeof(T) == 2 && at == nullptr) return;  // for fp32, the branch would spill registers
#pragma unroll
    for (int i = 0; i < Pack<T, N>::kWords; ++i) {
      if constexpr (sizeof(T) == 4) bits = max(bits, pack.word[i] & 0x7fffffffu);
      else bits = max_halves(bits, pack.word[i] & 0x7fff7fffu);
    }
  }

  __device__ __forceinline__ void see(const Pack<T, 1>& pack) {
    if (sizeof(T) == 4 && at == nullptr) return;  // without the branch here, and with one for 16 bits, registers spill
    if constexpr (sizeof(T) == 4) bits = max(bits, __float_as_uint(pack.value) & 0x7fffffffu);
    else bits = max(bits, pack.value.bits & 0x7fffu);
  }

  // Raises the tensor's amax. All threads of the block must make the call. Most warps find a larger amax there already,
  // so that few atomic operations meet.
  __device__ __forceinline__ void write() const {
    if (at == nullptr) return;
    uint32_t most = bits;
    if constexpr (sizeof(T) == 2) {
      T larger;
      larger.bits = static_cast<uint16_t>(max(bits >> 16, bits & 0xffffu));
      most = __float_as_uint(to_float(larger));
    }
    const bool whole = (threadIdx.x | (kWarp - 1)) < blockDim.x;  // the last warp may lack lanes
    for (int offset = kWarp / 2; whole && offset > 0; offset /= 2)
      most = max(most, __shfl_xor_sync(kAllLanes, most, offset));
    if (whole && threadIdx.x % kWarp != 0) return;
    unsigned* const out = reinterpret_cast<unsigned*>(at);
    if (most > __ldcg(out)) atomicMax(out, most);
  }
};

// Stores N elements and includes them in the amax.
template <int N, typename T>
__device__ __forceinline__ void store_floats(T* at, const float* values, Amax<T>& amax) {
  const Pack<T, N> pack = Pack<T, N>::of(values);
  amax.see(pack);
  store_pack<N>(at, pack);
}

}  // namespace gptlite
