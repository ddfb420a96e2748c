// Bias and GELU, forward and backward.
//
// A thread keeps to a pack of columns and walks down the rows, four of them under way at once (columns.cuh): the bias
// stays in registers. Forward: x read, y written once: 2 elements moved for each. Backward: dy and x read, dx written:
// 3; dbias is summed in registers on the way, in at most 256 parts, which column_sums.cu adds up. Both the least there
// is.
#include "columns.cuh"

namespace gptlite {
namespace {

constexpr float kTanhFactor = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kTanhSlope = 2.0f * kTanhFactor * 0.044715f;  // of the square
constexpr float kErfFactor = 0.7071067811865476f;     // sqrt(1 / 2)
constexpr float kNormalDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)

// 1 / (1 + exp(-x)); 0 and 1 at the ends.
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (std::is_same<T, float>::value) return 1.0f / (1.0f + expf(-x));
  return fast_inverse(1.0f + fast_exp2(-kLog2E * x));
}

// (1 + tanh u) / 2 is the sigmoid of 2 u, which keeps its relative accuracy where it is small.
template <typename T, bool Approximate>
__device__ __forceinline__ float gelu(float x) {
  if constexpr (Approximate) return x * sigmoid<T>(x * fmaf(kTanhSlope, x * x, 2.0f * kTanhFactor));
  return 0.5f * x * (1.0f + erff(x * kErfFactor));
}

template <typename T, bool Approximate>
__device__ __forceinline__ float gelu_slope(float x) {
  if constexpr (Approximate) {
    const float s = sigmoid<T>(x * fmaf(kTanhSlope, x * x, 2.0f * kTanhFactor));
    const float change = s * (1.0f - s);
    // Past where the cube is infinite the slope is s: not infinity times 0.
    return change == 0.0f ? s : s + x * change * fmaf(3.0f * kTanhSlope, x * x, 2.0f * kTanhFactor);
  }
  const float density = kNormalDensity * exponential<T>(-0.5f * x * x);
  return 0.5f * (1.0f + erff(x * kErfFactor)) + (density == 0.0f ? 0.0f : x * density);
}

template <typename T, int V>
__device__ __forceinline__ void load_bias(float* bias, const T* from, int64_t column, int64_t width) {
#pragma unroll
  for (int k = 0; k < V; ++k) bias[k] = 0.0f;
  if (from != nullptr && column < width) load_floats<V>(bias, from + column);
}

template <typename T, int V, bool Approximate>
__global__ void __launch_bounds__(kColumnBlock)
    forward_kernel(T* y, const T* x, const T* bias_row, int64_t rows, int64_t width, ColumnGrid grid) {
  const ColumnThread at(grid, V);
  float bias[V];
  load_bias<T, V>(bias, bias_row, at.column, width);
  for (int64_t row = at.row; row < rows && at.column < width; row += kRowsAtOnce * at.step) {
    Pack<T, V> packs[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step < rows) packs[i] = load_pack<V>(x + (row + i * at.step) * width + at.column);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step >= rows) continue;
      float v[V];
#pragma unroll
      for (int k = 0; k < V; ++k) v[k] = gelu<T, Approximate>(packs[i].at(k) + bias[k]);
      store_floats<V>(y + (row + i * at.step) * width + at.column, v);
    }
  }
}

template <typename T, int V, bool Approximate>
__global__ void __launch_bounds__(kColumnBlock)
    backward_kernel(T* dx, float* parts, const T* dy, const T* x, const T* bias_row, int64_t rows, int64_t width,
                    ColumnGrid grid) {
  GPTLITE_SHARED(float, shared);
  const ColumnThread at(grid, V);
  float bias[V], sum[V] = {};
  load_bias<T, V>(bias, bias_row, at.column, width);
  for (int64_t row = at.row; row < rows && at.column < width; row += kRowsAtOnce * at.step) {
    Pack<T, V> x_packs[kRowsAtOnce], dy_packs[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step >= rows) continue;
      x_packs[i] = load_pack<V>(x + (row + i * at.step) * width + at.column);
      dy_packs[i] = load_pack<V>(dy + (row + i * at.step) * width + at.column);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step >= rows) continue;
      float v[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        v[k] = dy_packs[i].at(k) * gelu_slope<T, Approximate>(x_packs[i].at(k) + bias[k]);
        sum[k] += v[k];
      }
      store_floats<V>(dx + (row + i * at.step) * width + at.column, v);
    }
  }
  if (parts != nullptr) store_part<V>(parts, sum, grid, at, width, shared);
}

template <typename T, int V>
int forward(void* y, const void* x, const void* bias, int64_t rows, int64_t width, bool approximate, void* stream) {
  const int64_t tiles = divide_up(divide_up(width, V), kColumnBlock);
  const ColumnGrid grid = column_grid(rows, width, V, divide_up(32 * processors(), tiles));
  const auto kernel = approximate ? forward_kernel<T, V, true> : forward_kernel<T, V, false>;
  return launch(kernel, grid.blocks(), grid.block(), 0, stream, static_cast<T*>(y), static_cast<const T*>(x),
                static_cast<const T*>(bias), rows, width, grid);
}

template <typename T, int V>
int backward(void* dx, void* dbias, float* parts, const void* dy, const void* x, const void* bias, int64_t rows,
             int64_t width, bool approximate, int dtype, void* stream) {
  const ColumnGrid grid = column_grid(rows, width, V, kMaxParts);
  const auto kernel = approximate ? backward_kernel<T, V, true> : backward_kernel<T, V, false>;
  const int error = launch(kernel, grid.blocks(), grid.block(), grid.block() * V * sizeof(float), stream,
                           static_cast<T*>(dx), dbias != nullptr ? parts : nullptr, static_cast<const T*>(dy),
                           static_cast<const T*>(x), static_cast<const T*>(bias), rows, width, grid);
  if (error != 0) return error;
  return add_parts(ColumnSums{{dbias, nullptr, nullptr}, parts, grid.chunks, width, dtype}, stream);
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_bias_gelu_forward(void* y, const void* x, const void* bias, int64_t rows, int64_t width,
                                   int approximate, int dtype, void* stream) {
  using namespace gptlite;
  if (width == 0) return 0;
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int V = kFullPack<T>;
    const bool packs = width % V == 0 && aligned(y, x, bias);
    return packs ? forward<T, V>(y, x, bias, rows, width, approximate != 0, stream)
                 : forward<T, 1>(y, x, bias, rows, width, approximate != 0, stream);
  });
}

int gptlite_cuda_bias_gelu_backward(void* dx, void* dbias, float* workspace, const void* dy, const void* x,
                                    const void* bias, int64_t rows, int64_t width, int approximate, int dtype,
                                    void* stream) {
  using namespace gptlite;
  if (width == 0) return 0;
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int V = kFullPack<T>;
    const bool packs = width % V == 0 && aligned(dx, dy, x, bias);
    return packs ? backward<T, V>(dx, dbias, workspace, dy, x, bias, rows, width, approximate != 0, dtype, stream)
                 : backward<T, 1>(dx, dbias, workspace, dy, x, bias, rows, width, approximate != 0, dtype, stream);
  });
}
