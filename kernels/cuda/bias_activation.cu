// Bias and activation of an MLP, forward and backward: y = f(x + bias), or for a gated kind (SwiGLU, GeGLU)
// y = f(gate + bias) * (value + bias). The gate and value of a unit are two adjacent columns of x.
//
// Grid (columns.cuh): a block of up to 256 threads covers a range of columns and loops over rows. A thread stays in a
// pack of units, whose bias it keeps in registers, and advances down the rows with four loads in flight. The backward
// kernel also sums dbias in registers, in at most 256 parts, which column_sums.cu adds.
//
// Traffic, the minimum in both directions: the forward pass reads x and writes y, 2 elements moved per element of x
// (1.5 if gated). The backward pass reads dy and x and writes dx, 3 elements (2.5 if gated).
#include "amax.cuh"
#include "columns.cuh"

namespace gptlite {
namespace {

constexpr float kTanhFactor = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kTanhSlope = 2.0f * kTanhFactor * 0.044715f;  // factor of x^2
constexpr float kErfFactor = 0.7071067811865476f;     // sqrt(1 / 2)
constexpr float kNormalDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)

// Returns 1 / (1 + exp(-x)). The result is 0 where exp(-x) overflows.
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (std::is_same<T, float>::value) return 1.0f / (1.0f + expf(-x));
  return fast_inverse(1.0f + fast_exp2(-kLog2E * x));
}

// GELU in its tanh approximation (arXiv:1606.08415): x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3).
// Computed as x sigmoid(2 u), which equals it and keeps its relative accuracy where the result is small.
template <typename T>
struct TanhGelu {
  __device__ __forceinline__ static float value(float x) {
    return x * sigmoid<T>(x * fmaf(kTanhSlope, x * x, 2.0f * kTanhFactor));
  }
  __device__ __forceinline__ static float slope(float x) {
    const float s = sigmoid<T>(x * fmaf(kTanhSlope, x * x, 2.0f * kTanhFactor));
    const float change = s * (1.0f - s);
    // For large |x|, `change` is 0 and x^2 may overflow. 0 * infinity would make the slope NaN.
    return change == 0.0f ? s : s + x * change * fmaf(3.0f * kTanhSlope, x * x, 2.0f * kTanhFactor);
  }
};

template <typename T>
struct ErfGelu {
  __device__ __forceinline__ static float value(float x) { return 0.5f * x * (1.0f + erff(x * kErfFactor)); }
  __device__ __forceinline__ static float slope(float x) {
    const float density = kNormalDensity * exponential<T>(-0.5f * x * x);
    return 0.5f * (1.0f + erff(x * kErfFactor)) + (density == 0.0f ? 0.0f : x * density);
  }
};

template <typename T>
struct Silu {
  __device__ __forceinline__ static float value(float x) { return x * sigmoid<T>(x); }
  __device__ __forceinline__ static float slope(float x) {
    const float s = sigmoid<T>(x);
    return fmaf(x, s * (1.0f - s), s);
  }
};

// Both functions propagate NaN: the comparisons with NaN are false.
struct Relu {
  __device__ __forceinline__ static float value(float x) { return x <= 0.0f ? 0.0f : x; }
  __device__ __forceinline__ static float slope(float x) { return x > 0.0f ? 1.0f : value(x); }
};

struct Relu2 {
  __device__ __forceinline__ static float value(float x) { return Relu::value(x) * Relu::value(x); }
  __device__ __forceinline__ static float slope(float x) { return 2.0f * Relu::value(x); }
};

template <typename T, int Kind>
struct Function;
template <typename T>
struct Function<T, GPTLITE_GELU_TANH> : TanhGelu<T> {};
template <typename T>
struct Function<T, GPTLITE_GELU_ERF> : ErfGelu<T> {};
template <typename T>
struct Function<T, GPTLITE_RELU> : Relu {};
template <typename T>
struct Function<T, GPTLITE_RELU2> : Relu2 {};
template <typename T>
struct Function<T, GPTLITE_SWIGLU> : Silu<T> {};
template <typename T>
struct Function<T, GPTLITE_GEGLU> : ErfGelu<T> {};

template <int Kind>
constexpr int kColumns = Kind >= GPTLITE_SWIGLU ? 2 : 1;  // columns of x per unit

// C columns of x: a pack, or C single elements if rows are not aligned to packs.
template <typename T, int C, bool Packed>
struct Columns {
  Pack<T, C> pack;
  __device__ __forceinline__ void load(const T* from) { pack = load_pack<C>(from); }
  __device__ __forceinline__ float at(int k) const { return pack.at(k); }
  __device__ __forceinline__ static void store(T* to, const float* values, Amax<T>& amax) {
    store_floats<C>(to, values, amax);
  }
};

template <typename T, int C>
struct Columns<T, C, false> {
  T single[C];
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int k = 0; k < C; ++k) single[k] = from[k];
  }
  __device__ __forceinline__ float at(int k) const { return to_float(single[k]); }
  __device__ __forceinline__ static void store(T* to, const float* values, Amax<T>& amax) {
#pragma unroll
    for (int k = 0; k < C; ++k) store_floats<1>(to + k, values + k, amax);
  }
};

template <typename T, int V, int Kind>
using Inputs = Columns<T, V * kColumns<Kind>, (V > 1)>;

template <int C, typename Inputs, typename T>
__device__ __forceinline__ void load_bias(float* bias, const T* from, bool inside) {
  Inputs loaded;
  if (from != nullptr && inside) loaded.load(from);
#pragma unroll
  for (int k = 0; k < C; ++k) bias[k] = from != nullptr && inside ? loaded.at(k) : 0.0f;
}

// V: units of a thread. Grid and block: see ColumnGrid. A thread loads four of its rows before it computes and stores
// them.
template <typename T, int V, int Kind>
__global__ void __launch_bounds__(kColumnBlock)
    forward_kernel(T* y, const T* x, const T* bias_row, int64_t rows, int64_t width, float* amax_at,
                   ColumnGrid grid) {
  using F = Function<T, Kind>;
  constexpr int K = kColumns<Kind>, C = K * V;
  const ColumnThread at(grid, V);
  Amax<T> amax(amax_at);
  float bias[C];
  load_bias<C, Inputs<T, V, Kind>>(bias, bias_row == nullptr ? nullptr : bias_row + K * at.column, at.column < width);
  for (int64_t row = at.row; row < rows && at.column < width; row += kRowsAtOnce * at.step) {
    Inputs<T, V, Kind> inputs[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step < rows) inputs[i].load(x + K * ((row + i * at.step) * width + at.column));
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step >= rows) continue;
      float v[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        v[k] = F::value(inputs[i].at(K * k) + bias[K * k]);
        if constexpr (K == 2) v[k] *= inputs[i].at(2 * k + 1) + bias[2 * k + 1];
      }
      store_floats<V>(y + (row + i * at.step) * width + at.column, v, amax);
    }
  }
  amax.write();
}

// Same grid and block as the forward kernel. `parts` is NULL if dbias is not wanted.
template <typename T, int V, int Kind>
__global__ void __launch_bounds__(kColumnBlock)
    backward_kernel(T* dx, float* parts, const T* dy, const T* x, const T* bias_row, int64_t rows, int64_t width,
                    float* amax_at, ColumnGrid grid) {
  using F = Function<T, Kind>;
  constexpr int K = kColumns<Kind>, C = K * V;
  GPTLITE_SHARED(float, shared);
  ColumnThread at(grid, V);
  Amax<T> amax(amax_at);
  float bias[C], sum[C] = {};
  load_bias<C, Inputs<T, V, Kind>>(bias, bias_row == nullptr ? nullptr : bias_row + K * at.column, at.column < width);
  for (int64_t row = at.row; row < rows && at.column < width; row += kRowsAtOnce * at.step) {
    Inputs<T, V, Kind> inputs[kRowsAtOnce];
    Pack<T, V> dy_packs[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step >= rows) continue;
      inputs[i].load(x + K * ((row + i * at.step) * width + at.column));
      dy_packs[i] = load_pack<V>(dy + (row + i * at.step) * width + at.column);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step >= rows) continue;
      float v[C];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const float gradient = dy_packs[i].at(k), u = inputs[i].at(K * k) + bias[K * k];
        v[K * k] = gradient * F::slope(u);
        if constexpr (K == 2) {
          v[2 * k] *= inputs[i].at(2 * k + 1) + bias[2 * k + 1];
          v[2 * k + 1] = gradient * F::value(u);
        }
      }
#pragma unroll
      for (int k = 0; k < C; ++k) sum[k] += v[k];
      Inputs<T, V, Kind>::store(dx + K * ((row + i * at.step) * width + at.column), v, amax);
    }
  }
  amax.write();
  if (parts == nullptr) return;
  at.column *= K;
  store_part<C>(parts, sum, grid, at, K * width, shared);
}

template <typename T, int V, int Kind>
int forward(void* y, const void* x, const void* bias, int64_t rows, int64_t width, float* amax, void* stream) {
  const int64_t tiles = divide_up(divide_up(width, V), kColumnBlock);
  const ColumnGrid grid = column_grid(rows, width, V, divide_up(32 * processors(), tiles));
  return launch(forward_kernel<T, V, Kind>, grid.blocks(), grid.block(), 0, stream, static_cast<T*>(y),
                static_cast<const T*>(x), static_cast<const T*>(bias), rows, width, amax, grid);
}

template <typename T, int V, int Kind>
int backward(void* dx, void* dbias, float* parts, const void* dy, const void* x, const void* bias, int64_t rows,
             int64_t width, int dtype, float* amax, void* stream) {
  constexpr int K = kColumns<Kind>;
  const ColumnGrid grid = column_grid(rows, width, V, kMaxParts);
  const int error = launch(backward_kernel<T, V, Kind>, grid.blocks(), grid.block(),
                           grid.block() * K * V * sizeof(float), stream, static_cast<T*>(dx),
                           dbias != nullptr ? parts : nullptr, static_cast<const T*>(dy), static_cast<const T*>(x),
                           static_cast<const T*>(bias), rows, width, amax, grid);
  if (error != 0) return error;
  return add_parts(ColumnSums{{dbias, nullptr, nullptr}, parts, grid.chunks, K * width, dtype}, stream);
}

// Calls f with `kind` as a compile-time constant, and returns the error number that f returns.
template <typename F>
int by_kind(int kind, F f) {
  switch (kind) {
    case GPTLITE_GELU_TANH:
      return f(std::integral_constant<int, GPTLITE_GELU_TANH>{});
    case GPTLITE_GELU_ERF:
      return f(std::integral_constant<int, GPTLITE_GELU_ERF>{});
    case GPTLITE_RELU:
      return f(std::integral_constant<int, GPTLITE_RELU>{});
    case GPTLITE_RELU2:
      return f(std::integral_constant<int, GPTLITE_RELU2>{});
    case GPTLITE_SWIGLU:
      return f(std::integral_constant<int, GPTLITE_SWIGLU>{});
    case GPTLITE_GEGLU:
      return f(std::integral_constant<int, GPTLITE_GEGLU>{});
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_bias_activation_forward(void* y, const void* x, const void* bias, int64_t rows, int64_t width, int kind,
                                         int dtype, float* amax, void* stream) {
  using namespace gptlite;
  if (width == 0) return 0;
  return by_dtype(dtype, [&](auto element) {
    return by_kind(kind, [&](auto kind_) {
      using T = decltype(element);
      constexpr int Kind = decltype(kind_)::value, V = kFullPack<T>;
      const bool packs = width % V == 0 && aligned(y, x, bias);
      return packs ? forward<T, V, Kind>(y, x, bias, rows, width, amax, stream)
                   : forward<T, 1, Kind>(y, x, bias, rows, width, amax, stream);
    });
  });
}

// For a gated kind, a thread has a full pack of x and dx, but half a pack of dy. With more columns, the sums of a
// thread would take too many registers.
int gptlite_cuda_bias_activation_backward(void* dx, void* dbias, float* workspace, const void* dy, const void* x,
                                          const void* bias, int64_t rows, int64_t width, int kind, int dtype,
                                          float* amax, void* stream) {
  using namespace gptlite;
  if (width == 0) return 0;
  return by_dtype(dtype, [&](auto element) {
    return by_kind(kind, [&](auto kind_) {
      using T = decltype(element);
      constexpr int Kind = decltype(kind_)::value, V = kFullPack<T> / kColumns<Kind>;
      const bool packs = width % V == 0 && aligned(dx, dy, x, bias);
      return packs ? backward<T, V, Kind>(dx, dbias, workspace, dy, x, bias, rows, width, dtype, amax, stream)
                   : backward<T, 1, Kind>(dx, dbias, workspace, dy, x, bias, rows, width, dtype, amax, stream);
    });
  });
}
