// Sums and maxima over the threads that share a row. The order of operations is fixed, so results are reproducible.
#pragma once

#include "launch.cuh"

namespace gptlite {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  __device__ static __forceinline__ float of(float a, float b) { return a + b; }
};

// fmaxf ignores NaN. In a softmax, the exponentials computed after the maximum are NaN again.
struct Max {
  __device__ static __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

// Reduces N values over each group of `threads` consecutive threads; all threads of the group get the results.
// `threads` is a power of two up to a warp, or a multiple of a warp. All threads of the block must make the call. Warps
// reduce by shuffles. Groups of several warps then combine the warps' results in `slots`, N floats of shared memory per
// warp of the block. Reuse of `slots` requires another __syncthreads() in between, so consecutive calls use different
// slots.
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
