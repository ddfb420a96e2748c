// The part of the CUDA language and runtime that kernels/cuda uses, for a host compiler. kernels/cuda includes this
// file instead of cuda_runtime.h. It is compiled with the thread and undefined-behaviour instrumentation of g++, whose
// calls hooks.cpp implements.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
// Inlined at any optimization level, so that a fault is reported with the line of the kernel.
#define GPTLITE_INLINE __attribute__((always_inline)) inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// Static shared memory is a static variable of the library, since only one block runs at a time. memory.cpp treats all
// writable statics as shared memory.
#define __shared__ static

struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;

typedef int cudaError_t;
typedef struct gptlite_emu_stream* cudaStream_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9, cudaErrorLaunchFailure = 719 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };

cudaError_t cudaGetLastError();
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

namespace gptlite::emu {

// Constant within a fiber, and a kernel function never moves to another fiber, so the compiler may merge calls.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) uint3 block_size();
__attribute__((const)) uint3 grid_size();

void sync_threads(int line);
void sync_warp(unsigned mask, int line);

enum class Shuffle { index, up, down, exclusive_or };
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t bits, int operand, int width, int line);

template <typename T>
GPTLITE_INLINE T shuffle_value(Shuffle kind, unsigned mask, T value, int operand, int width, int line) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "shuffles move int, float and their 64-bit kin");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = shuffle(kind, mask, bits, operand, width, line);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

// Raises *address to `value`, and returns what was there.
unsigned atomic_max(unsigned* address, unsigned value);

// Returns the dynamic shared memory of the block.
void* shared_memory();

struct Launch {
  void (*run)(const void* arguments);  // runs one thread of the kernel
  const void* kernel;
  const void* arguments;
  size_t argument_bytes;
  dim3 grid;
  dim3 block;
  size_t shared;
};

// Runs all blocks. Returns 0 or the cudaError_t; gptlite_emu_error() describes the fault.
int run(const Launch& launch);

template <typename... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> arguments;

  static void run(const void* call) {
    const Call* self = static_cast<const Call*>(call);
    std::apply(self->kernel, self->arguments);
  }
};

template <typename... Parameters>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, void* stream,
           std::common_type_t<Parameters>... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "an argument of a kernel is copied as bytes");
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "arguments of a kernel take 4 KB at most");
  (void)stream;  // launches are synchronous
  const Call<Parameters...> call{kernel, {arguments...}};
  const void* address = reinterpret_cast<const void*>(kernel);
  return run({Call<Parameters...>::run, address, &call, sizeof(call), grid, block, shared});
}

}  // namespace gptlite::emu

#define threadIdx (::gptlite::emu::thread_index())
#define blockIdx (::gptlite::emu::block_index())
#define blockDim (::gptlite::emu::block_size())
#define gridDim (::gptlite::emu::grid_size())
constexpr int warpSize = 32;

#define GPTLITE_SHARED(type, name) type* name = static_cast<type*>(::gptlite::emu::shared_memory())

GPTLITE_INLINE void __syncthreads(int line = __builtin_LINE()) { ::gptlite::emu::sync_threads(line); }
GPTLITE_INLINE void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  ::gptlite::emu::sync_warp(mask, line);
}

template <typename T>
GPTLITE_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32, int line = __builtin_LINE()) {
  return ::gptlite::emu::shuffle_value(::gptlite::emu::Shuffle::index, mask, value, lane, width, line);
}
template <typename T>
GPTLITE_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  return ::gptlite::emu::shuffle_value(::gptlite::emu::Shuffle::up, mask, value, delta, width, line);
}
template <typename T>
GPTLITE_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  return ::gptlite::emu::shuffle_value(::gptlite::emu::Shuffle::down, mask, value, delta, width, line);
}
template <typename T>
GPTLITE_INLINE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, int line = __builtin_LINE()) {
  return ::gptlite::emu::shuffle_value(::gptlite::emu::Shuffle::exclusive_or, mask, value, lane_mask, width, line);
}

template <typename T>
GPTLITE_INLINE T __ldg(const T* address) {
  return *address;
}
inline unsigned atomicMax(unsigned* address, unsigned value) { return ::gptlite::emu::atomic_max(address, value); }
// A load that sees what atomic operations of other blocks have written.
inline unsigned __ldcg(const unsigned* address) {
  return ::gptlite::emu::atomic_max(const_cast<unsigned*>(address), 0);
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<uint64_t>(x) * y >> 32; }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  __builtin_memcpy(&bits, &x, sizeof(x));
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}
