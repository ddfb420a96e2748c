// Element types (fp32, bf16, fp16; e5m2 to be written only), packs of elements that one instruction loads or stores, and
// dispatch from a dtype number to a template argument. Arithmetic is in fp32: elements are converted when loaded and
// rounded when stored.
#pragma once

#include "fp8.h"
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

// Rounds to e5m2; values beyond the largest become the largest.
template <>
__device__ __forceinline__ E5m2 from_float<E5m2>(float x) {
#ifdef GPTLITE_EMU
  return E5m2{static_cast<uint8_t>(fp8_bits<E5m2>(x))};
#else
  return E5m2{__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2)};
#endif
}

// Return 2^x and 1 / x by one instruction, accurate to 2 units in the last place. Results below 2^-126 are flushed to
// 0; __expf and __fdividef take four more instructions to keep them.
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef GPTLITE_EMU
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

__device__ __forceinline__ float fast_inverse(float x) {
#ifdef GPTLITE_EMU
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

constexpr float kLog2E = 1.4426950408889634f;

// Returns exp(x), from the hardware's approximation if the result is rounded to 16 bits. There, the 20 instructions of
// expf would take longer than the memory traffic.
template <typename T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (std::is_same<T, float>::value) return expf(x);
  return fast_exp2(kLog2E * x);
}

constexpr int kPackBytes = 16;

// Returns element k of an array of T that is stored as 32-bit words: a float, or for uint8_t an integer. k must be a
// compile-time constant after unrolling, so that the words stay in registers.
template <typename T>
__device__ __forceinline__ auto element(const uint32_t* word, int k) {
  if constexpr (std::is_same<T, float>::value) return __uint_as_float(word[k]);
  else if constexpr (std::is_same<T, uint8_t>::value) return word[k / 4] >> (8 * (k % 4)) & 0xffu;
  else if constexpr (std::is_same<T, Bf16>::value)
    return __uint_as_float(k % 2 == 0 ? word[k / 2] << 16 : word[k / 2] & 0xffff0000u);
#ifdef GPTLITE_EMU
  else return fp16_to_float(static_cast<uint16_t>(word[k / 2] >> (16 * (k % 2))));
#else
  else {
    const __half2 pair = reinterpret_cast<const __half2&>(word[k / 2]);
    return k % 2 == 0 ? __low2float(pair) : __high2float(pair);
  }
#endif
}

// Returns two 16-bit elements as one word, `low` in the lower half. One instruction rounds both.
template <typename T>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
#ifdef GPTLITE_EMU
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
#else
  if constexpr (std::is_same<T, Bf16>::value) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
#endif
}

// Returns four elements in e5m2 as one word, the first in the lowest byte. One instruction rounds two of them (sm_89).
__device__ __forceinline__ uint32_t four_of(const float* values) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
#ifdef GPTLITE_EMU
    const uint32_t pair = fp8_bits<E5m2>(values[i]) | fp8_bits<E5m2>(values[i + 1]) << 8;
#else
    const uint32_t pair = __nv_cvt_float2_to_fp8x2(make_float2(values[i], values[i + 1]), __NV_SATFINITE, __NV_E5M2);
#endif
    word |= pair << (8 * i);
  }
  return word;
}

// N elements that are loaded or stored together. They are kept as 32-bit words, because nvcc would split an array of
// 16-bit elements into one register and one store per element.
template <typename T, int N>
struct Pack {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  static_assert(kWords * 4 == N * static_cast<int>(sizeof(T)), "packs are of whole words");
  uint32_t word[kWords];

  __device__ __forceinline__ auto at(int k) const { return element<T>(word, k); }

  __device__ __forceinline__ static Pack of(const float* values) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) pack.word[i] = __float_as_uint(values[i]);
      else if constexpr (sizeof(T) == 1) pack.word[i] = four_of(values + 4 * i);
      else pack.word[i] = pair_of<T>(values[2 * i], values[2 * i + 1]);
    }
    return pack;
  }
};

template <typename T>
struct Pack<T, 1> {
  T value;

  __device__ __forceinline__ auto at(int) const {
    if constexpr (std::is_same<T, uint8_t>::value) return uint32_t{value};
    else return to_float(value);
  }

  __device__ __forceinline__ static Pack of(const float* values) { return Pack{from_float<T>(values[0])}; }
};

// Number of elements in a pack of 16 bytes, the widest access of a thread.
template <typename T>
constexpr int kFullPack = kPackBytes / static_cast<int>(sizeof(T));

// Loads a pack in accesses of 16 bytes, or of the size of the pack if that is less. `at` must be aligned to the access.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* at) {
  if constexpr (N == 1) {
    return Pack<T, 1>{*at};
  } else {
    constexpr int kWords = Pack<T, N>::kWords;
    Pack<T, N> pack;
    if constexpr (kWords == 1) pack.word[0] = *reinterpret_cast<const uint32_t*>(at);
    if constexpr (kWords == 2) {
      const uint2 bits = *reinterpret_cast<const uint2*>(at);
      pack.word[0] = bits.x, pack.word[1] = bits.y;
    }
#pragma unroll
    for (int i = 0; i + 4 <= kWords; i += 4) {
      const uint4 bits = reinterpret_cast<const uint4*>(at)[i / 4];
      pack.word[i] = bits.x, pack.word[i + 1] = bits.y, pack.word[i + 2] = bits.z, pack.word[i + 3] = bits.w;
    }
    return pack;
  }
}

// Loads into `pack` if `wanted`, else leaves it unchanged. Uses a predicated load, because a branch would cost register
// copies where its two paths merge.
template <int N, typename T>
__device__ __forceinline__ void load_pack_if(bool wanted, Pack<T, N>& pack, const T* at) {
#ifndef GPTLITE_EMU
  if constexpr (sizeof(pack) == kPackBytes && N > 1) {
    asm volatile(
        "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %4, 0;\n"
        " @wanted ld.global.v4.b32 {%0, %1, %2, %3}, [%5];\n}"
        : "+r"(pack.word[0]), "+r"(pack.word[1]), "+r"(pack.word[2]), "+r"(pack.word[3])
        : "r"(static_cast<uint32_t>(wanted)), "l"(__cvta_generic_to_global(at)));
    return;
  }
#endif
  if (wanted) pack = load_pack<N>(at);
}

// Stores four words to global memory by one instruction. nvcc may split an assignment to a uint4 into four stores if
// other stores are near.
__device__ __forceinline__ void store_words(void* at, const uint32_t* word) {
#ifdef GPTLITE_EMU
  *static_cast<uint4*>(at) = make_uint4(word[0], word[1], word[2], word[3]);
#else
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
#endif
}

template <int N, typename T>
__device__ __forceinline__ void store_pack(T* at, const Pack<T, N>& pack) {
  if constexpr (N == 1) {
    *at = pack.value;
  } else if constexpr (Pack<T, N>::kWords == 2) {
    *reinterpret_cast<uint2*>(at) = make_uint2(pack.word[0], pack.word[1]);
  } else {
    static_assert(Pack<T, N>::kWords % 4 == 0, "stores are of 16 bytes");
#pragma unroll
    for (int i = 0; i < Pack<T, N>::kWords; i += 4) store_words(reinterpret_cast<uint4*>(at) + i / 4, pack.word + i);
  }
}

// Stores a pack of 16 bytes to shared memory.
template <int N, typename T>
__device__ __forceinline__ void keep_pack(T* at, const Pack<T, N>& pack) {
  static_assert(Pack<T, N>::kWords == 4, "one access of 16 bytes");
#ifdef GPTLITE_EMU
  store_words(at, pack.word);
#else
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(at))),
               "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
#endif
}

template <int N, typename T>
__device__ __forceinline__ void load_floats(float* out, const T* at) {
  const Pack<T, N> pack = load_pack<N>(at);
#pragma unroll
  for (int k = 0; k < N; ++k) out[k] = pack.at(k);
}

template <int N, typename T>
__device__ __forceinline__ void store_floats(T* at, const float* values) {
  store_pack<N>(at, Pack<T, N>::of(values));
}

// Loads elements whose dtype is known only at run time (weight, bias, mask). All threads take the same branch.
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

// Calls f with a value of the element type of `dtype`, and returns the error number that f returns.
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

// Returns whether all pointers are aligned to a pack of 16 bytes. NULL counts as aligned.
template <typename... Pointers>
bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % kPackBytes == 0) && ...);
}

}  // namespace gptlite
