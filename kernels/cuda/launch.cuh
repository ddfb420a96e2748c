// Kernel launches and device queries, for nvcc and for the emulator (kernels/emu), which compiles the same sources with
// a host compiler.
//
// Of the CUDA runtime, the sources use only dim3, cudaStream_t, cudaSuccess, cudaErrorInvalidValue, cudaGetLastError,
// cudaFuncSetAttribute, cudaGetDevice and cudaDeviceGetAttribute. The emulator defines these, GPTLITE_SHARED and
// gptlite::emu::launch, which returns 0 or an error number.
#pragma once

#include <type_traits>

#ifdef GPTLITE_EMU
#include "../emu/cuda.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#endif

#include "../include/gptlite_kernels.h"

#ifndef GPTLITE_EMU
// Declares `name`, a pointer to the block's dynamic shared memory, aligned to 16 bytes.
#define GPTLITE_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char gptlite_shared[]; \
  type* name = reinterpret_cast<type*>(gptlite_shared)
#endif

namespace gptlite {

constexpr int64_t kMaxGrid = 2147483647;    // maximum gridDim.x
constexpr int64_t kPlainShared = 48 * 1024;  // bytes of dynamic shared memory without a request

// Launches kernel<<<blocks, block, shared, stream>>>(arguments...), with the arguments converted to the kernel's
// parameter types. Returns 0 or the cudaError_t. Does nothing for 0 blocks, which CUDA would report as an error.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int64_t block, int64_t shared, void* stream,
           Arguments... arguments) {
  if (blocks == 0) return 0;
  if (blocks > kMaxGrid) return static_cast<int>(cudaErrorInvalidValue);
  const dim3 grid_dim(static_cast<unsigned>(blocks)), block_dim(static_cast<unsigned>(block));
#ifdef GPTLITE_EMU
  return static_cast<int>(emu::launch(kernel, grid_dim, block_dim, static_cast<size_t>(shared),
                                      static_cast<cudaStream_t>(stream), static_cast<Parameters>(arguments)...));
#else
  kernel<<<grid_dim, block_dim, static_cast<size_t>(shared), static_cast<cudaStream_t>(stream)>>>(
      static_cast<Parameters>(arguments)...);
  return static_cast<int>(cudaGetLastError());
#endif
}

// Returns whether a block of the kernel can have `bytes` of dynamic shared memory. More than 48 KB must be requested
// from the runtime, which this function does.
template <typename... Parameters>
bool allow_shared(void (*kernel)(Parameters...), int64_t bytes) {
  if (bytes <= kPlainShared) return true;
  if (bytes > kMaxGrid) return false;
  if (cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(bytes)) == cudaSuccess)
    return true;
  cudaGetLastError();  // clear the error, which the next launch would report
  return false;
}

// Returns an attribute of the current device, or `otherwise` if the query fails.
inline int64_t device_attribute(cudaDeviceAttr attribute, int64_t otherwise) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess)
    return otherwise;
  return value;
}

// Returns the number of multiprocessors of the current device. 108 is that of an A100.
inline int64_t processors() { return device_attribute(cudaDevAttrMultiProcessorCount, 108); }

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace gptlite
