// Forward pass of layer norm and RMS norm, shared by layer_norm.cu and residual_norm.cu: the mean and the reciprocal
// standard deviation (rstd) of a row, and the normalized row. For an RMS norm (Rms), the mean is 0 and is not written.
#pragma once

#include <type_traits>

#include "amax.cuh"
#include "row.cuh"

namespace gptlite {

struct Norm {
  void* y;
  float* mean;
  float* rstd;
  const void* weight;  // may be NULL for an RMS norm
  const void* bias;    // or NULL
  int weight_dtype;
  int64_t rows;
  int64_t width;
  float eps;
  float inverse_width;  // avoids a division, which takes registers and stack
  float* amax;          // or NULL
};

// Calls f with `rms` as a compile-time constant.
template <typename F>
int by_norm(bool rms, F f) {
  return rms ? f(std::true_type{}) : f(std::false_type{});
}

// Bytes of shared memory for the reductions below: three floats per warp.
constexpr int64_t kNormShared = 3 * kMaxWarps * sizeof(float);

// Normalizes v, which holds columns column to column + V - 1, and writes it to `row` of y.
template <typename T, int V, bool Rms>
__device__ __forceinline__ void store_normed(const Norm& norm, int64_t row, int64_t column, const float* v, float mean,
                                             float rstd, Amax<T>& amax) {
  float weight[V], bias[V], y[V];
  if constexpr (Rms) {
#pragma unroll
    for (int k = 0; k < V; ++k) y[k] = v[k] * rstd;
    if (norm.weight != nullptr) {
      load_floats<V>(weight, norm.weight, norm.weight_dtype, column);
#pragma unroll
      for (int k = 0; k < V; ++k) y[k] *= weight[k];
    }
    store_floats<V>(static_cast<T*>(norm.y) + row * norm.width + column, y, amax);
    return;
  }
  load_floats<V>(weight, norm.weight, norm.weight_dtype, column);
#pragma unroll
  for (int k = 0; k < V; ++k) y[k] = (v[k] - mean) * rstd * weight[k];
  if (norm.bias != nullptr) {
    load_floats<V>(bias, norm.bias, norm.weight_dtype, column);
#pragma unroll
    for (int k = 0; k < V; ++k) y[k] += bias[k];
  }
  store_floats<V>(static_cast<T*>(norm.y) + row * norm.width + column, y, amax);
}

// Normalizes a held row: v has a thread's E elements, with zeros past the row's end. Computes the mean first and then
// the squared deviations from it, which avoids the cancellation of E[x^2] - mean^2.
template <typename T, int V, int E, bool Rms>
__device__ __forceinline__ void norm_held(const Norm& norm, const RowThread& at, int width, const float* v,
                                          float* slots) {
  constexpr int kPacks = E / V;
  float sum = 0.0f, squares = 0.0f, mean = 0.0f;
  if constexpr (!Rms) {
#pragma unroll
    for (int k = 0; k < E; ++k) sum += v[k];
    mean = group_reduce<Sum>(sum, at.threads, slots) * norm.inverse_width;
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    // Skip the zeros past the row's end, whose deviation from the mean is not 0. For an RMS norm they add nothing, and
    // with single elements the branch would spill registers.
    if (!(Rms && V == 1) && (at.lane + i * at.threads) * V >= width) continue;
#pragma unroll
    for (int k = 0; k < V; ++k) squares = fmaf(v[i * V + k] - mean, v[i * V + k] - mean, squares);
  }
  squares = group_reduce<Sum>(squares, at.threads, slots + kMaxWarps);
  const float rstd = rsqrtf(fmaf(squares, norm.inverse_width, norm.eps));
  Amax<T> amax(norm.amax);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (at.lane + i * at.threads) * V;
    if (column < width) store_normed<T, V, Rms>(norm, at.row, column, v + i * V, mean, rstd, amax);
  }
  amax.write();
  if (at.lane == 0 && width > 0) {
    if constexpr (!Rms) norm.mean[at.row] = mean;
    norm.rstd[at.row] = rstd;
  }
}

// Moments of a part of a long row: the count, the mean and the sum of squared deviations from it. Two parts are merged
// by the formula of Chan, Golub and LeVeque (1979), without cancellation. For an RMS norm, only the sum of squares is
// used.
template <bool Rms>
struct Moments {
  float count;
  float mean;
  float squares;

  __device__ __forceinline__ void merge(float other_count, float other_mean, float other_squares) {
    const float total = count + other_count, difference = other_mean - mean;
    if (total == 0.0f) return;
    mean += difference * (other_count / total);
    squares += other_squares + difference * difference * (count * (other_count / total));
    count = total;
  }

  template <int V>
  __device__ __forceinline__ void add(const float* v) {
    if constexpr (Rms) {
#pragma unroll
      for (int k = 0; k < V; ++k) squares = fmaf(v[k], v[k], squares);
      return;
    }
    float sum = 0.0f, about = 0.0f;
#pragma unroll
    for (int k = 0; k < V; ++k) sum += v[k];
    const float middle = sum / V;
#pragma unroll
    for (int k = 0; k < V; ++k) about = fmaf(v[k] - middle, v[k] - middle, about);
    merge(V, middle, about);
  }

  // Merges the moments of a block of kLongBlock threads, in a fixed order. All threads get the result.
  __device__ __forceinline__ void merge_block(float* slots) {
    if constexpr (Rms) {
      squares = group_reduce<Sum>(squares, kLongBlock, slots);
      return;
    }
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const float other_count = __shfl_xor_sync(kAllLanes, count, offset);
      const float other_mean = __shfl_xor_sync(kAllLanes, mean, offset);
      const float other_squares = __shfl_xor_sync(kAllLanes, squares, offset);
      merge(other_count, other_mean, other_squares);
    }
    const int warp = threadIdx.x / kWarp;
    if (threadIdx.x % kWarp == 0) {
      slots[warp * 3] = count;
      slots[warp * 3 + 1] = mean;
      slots[warp * 3 + 2] = squares;
    }
    __syncthreads();
    *this = Moments{slots[0], slots[1], slots[2]};
    for (int w = 1; w < kMaxWarps; ++w) merge(slots[w * 3], slots[w * 3 + 1], slots[w * 3 + 2]);
  }
};

// Normalizes a long row of x, in a second pass over it. `moments` are those of the thread's elements.
template <typename T, int V, bool Rms>
__device__ __forceinline__ void norm_long(const Norm& norm, const RowThread& at, const T* x, Moments<Rms> moments,
                                          float* slots) {
  moments.merge_block(slots);
  const float rstd = rsqrtf(fmaf(moments.squares, norm.inverse_width, norm.eps));
  Amax<T> amax(norm.amax);
#pragma unroll 4
  for (int64_t column = static_cast<int64_t>(at.lane) * V; column < norm.width; column += kLongBlock * V) {
    float v[V];
    load_floats<V>(v, x + at.row * norm.width + column);
    store_normed<T, V, Rms>(norm, at.row, column, v, moments.mean, rstd, amax);
  }
  amax.write();
  if (at.lane == 0) {
    if constexpr (!Rms) norm.mean[at.row] = moments.mean;
    norm.rstd[at.row] = rstd;
  }
}

}  // namespace gptlite
