// Sums and maxima over the threads of a row, in a fixed order.
#pragma once

#include "launch.cuh"

namespace gptlite {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  __device__ static __forceinline__ float of(float a, float b) { return a + b; }
};

// Leaves NaN out: the exponentials that follow a maximum bring it back.
struct Max {
  __device__ static __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

// N values over each group of `threads` threads, which all have the results: groups of a power of two up to a warp, or
// of whole warps. All of a block must call it. Groups beyond a warp need `slots`, N floats for each warp of the block;
// the same slots may be used again after another __syncthreads() alone, so calls in turn have slots in turn.
template <typename Op, int N>
__device__ __forceinline__ void group_reduce(float (&value)[N], int threads, float* slots) {
  for (int offset = (threads < kWarp ? threads : kWarp) / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] = Op::of(value[k], __shfl_xor_sync(kAllLanes, value[k], offset));
  }
  if (threads <= kWarp) return;
  const int warp = threadIdx.x / kWarp, warps = threads / kWarp;
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int k = 0; k < N; ++k) slots[warp * N + k] = value[k];
  }
  __syncthreads();
  const float* group = slots + (warp - warp % warps) * N;
#pragma unroll
  for (int k = 0; k < N; ++k) value[k] = group[k];
#pragma unroll 4
  for (int w = 1; w < warps; ++w) {
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] = Op::of(value[k], group[w * N + k]);
  }
}

template <typename Op>
__device__ __forceinline__ float group_reduce(float value, int threads, float* slots) {
  float values[1] = {value};
  group_reduce<Op>(values, threads, slots);
  return values[0];
}

}  // namespace gptlite
