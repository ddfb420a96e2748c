// Elements of three dtypes, packs of them that are loaded at once, and the choice of a template by a dtype's number.
#pragma once

#include "launch.cuh"
#ifdef GPTLITE_EMU
#include "half_bits.cuh"
#endif

namespace gptlite {

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(Bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

__device__ __forceinline__ float to_float(Fp16 x) {
#ifdef GPTLITE_EMU
  return fp16_to_float(x.bits);
#else
  return __half2float(__ushort_as_half(x.bits));
#endif
}

template <typename T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

template <>
__device__ __forceinline__ Bf16 from_float<Bf16>(float x) {
#ifdef GPTLITE_EMU
  return Bf16{float_to_bf16(x)};
#else
  return Bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#endif
}

template <>
__device__ __forceinline__ Fp16 from_float<Fp16>(float x) {
#ifdef GPTLITE_EMU
  return Fp16{float_to_fp16(x)};
#else
  return Fp16{__half_as_ushort(__float2half_rn(x))};
#endif
}

// The hardware's exponential where the result is rounded to 16 bits; the exact one's 20 instructions would cost more
// than the memory does there.
template <typename T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (std::is_same<T, float>::value) return expf(x);
  return __expf(x);
}

constexpr int kPackBytes = 16;

// N elements in one load or store of at most 16 bytes.
template <typename T, int N>
struct alignas(N * sizeof(T) < kPackBytes ? N * sizeof(T) : kPackBytes) Pack {
  T value[N];
};

// Elements in a pack of 16 bytes.
template <typename T>
constexpr int kFullPack = kPackBytes / static_cast<int>(sizeof(T));

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* at) {
  return *reinterpret_cast<const Pack<T, N>*>(at);
}

template <int N, typename T>
__device__ __forceinline__ void store_pack(T* at, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(at) = pack;
}

template <int N, typename T>
__device__ __forceinline__ void load_floats(float* out, const T* at) {
  const Pack<T, N> pack = load_pack<N>(at);
#pragma unroll
  for (int k = 0; k < N; ++k) out[k] = to_float(pack.value[k]);
}

template <int N, typename T>
__device__ __forceinline__ void store_floats(T* at, const float* values) {
  Pack<T, N> pack;
#pragma unroll
  for (int k = 0; k < N; ++k) pack.value[k] = from_float<T>(values[k]);
  store_pack<N>(at, pack);
}

// The same for a dtype known at run time: a weight, a bias, a mask. Its branch is the same for a whole block.
template <int N>
__device__ __forceinline__ void load_floats(float* out, const void* data, int dtype, int64_t index) {
  if (dtype == GPTLITE_FP32) return load_floats<N>(out, static_cast<const float*>(data) + index);
  if (dtype == GPTLITE_BF16) return load_floats<N>(out, static_cast<const Bf16*>(data) + index);
  load_floats<N>(out, static_cast<const Fp16*>(data) + index);
}

__device__ __forceinline__ void store_float(void* data, int dtype, int64_t index, float value) {
  if (dtype == GPTLITE_FP32)
    static_cast<float*>(data)[index] = value;
  else if (dtype == GPTLITE_BF16)
    static_cast<Bf16*>(data)[index] = from_float<Bf16>(value);
  else
    static_cast<Fp16*>(data)[index] = from_float<Fp16>(value);
}

// f(an element of the dtype), which returns an error's number.
template <typename F>
int by_dtype(int dtype, F f) {
  if (dtype == GPTLITE_FP32) return f(float{});
  if (dtype == GPTLITE_BF16) return f(Bf16{});
  if (dtype == GPTLITE_FP16) return f(Fp16{});
  return static_cast<int>(cudaErrorInvalidValue);
}

inline bool is_float_dtype(int dtype) {
  return dtype == GPTLITE_FP32 || dtype == GPTLITE_BF16 || dtype == GPTLITE_FP16;
}

// Whether all pointers, of which any may be NULL, are aligned to a pack.
template <typename... Pointers>
bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % kPackBytes == 0) && ...);
}

}  // namespace gptlite
