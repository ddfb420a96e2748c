// Residual sum of a pre-norm transformer block, fused with the norm after it, forward:
// h = residual + dropout(x + bias), and y = layer norm or RMS norm of h.
//
// The row of h is rounded to the dtype, written, and normalized from registers. The dropout mask is computed (philox.h)
// and never stored. x and residual are read once, h and y are written once: 4 elements moved per element, the minimum.
// Rows wider than 8192 read h again.
#include "dropout.cuh"
#include "layer_norm.cuh"

namespace gptlite {
namespace {

struct Branch {
  void* h;
  const void* x;
  const void* bias;  // before the norm, or NULL
  const void* residual;
  int64_t positions;
  bool dropped;
  GptliteDropout dropout;
};

// Computes h in columns column to column + V - 1, from packs of x and of the residual. Writes the rounded h to memory
// and returns it in v.
template <typename T, int V>
__device__ __forceinline__ void branch_sum(float* v, const Branch& branch, const Norm& norm, const Pack<T, V>& x,
                                           const Pack<T, V>& residual, const DropoutRow& place, int64_t row,
                                           int64_t column) {
#pragma unroll
  for (int k = 0; k < V; ++k) v[k] = x.at(k);
  if (branch.bias != nullptr) {
    float bias[V];
    load_floats<V>(bias, branch.bias, norm.weight_dtype, column);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] += bias[k];
  }
  if (branch.dropped) drop<V>(v, branch.dropout, place, column);
#pragma unroll
  for (int k = 0; k < V; ++k) v[k] += residual.at(k);
  const Pack<T, V> h = Pack<T, V>::of(v);
#pragma unroll
  for (int k = 0; k < V; ++k) v[k] = h.at(k);
  store_pack<V>(static_cast<T*>(branch.h) + row * norm.width + column, h);
}

// Held rows. Grid and block: see row_grid. A thread holds E elements of its row.
template <typename T, int V, int E, bool Rms>
__global__ void __launch_bounds__(kMostThreads<E>) forward_held(Norm norm, Branch branch, int threads) {
  GPTLITE_SHARED(float, slots);
  const RowThread at(threads);
  const int width = at.row < norm.rows ? static_cast<int>(norm.width) : 0;
  const int64_t start = at.row * norm.width;
  Pack<T, V> x[E / V], residual[E / V];
#pragma unroll
  for (int i = 0; i < E / V; ++i) {
    const int column = (at.lane + i * threads) * V;
    if (column >= width) continue;
    x[i] = load_pack<V>(static_cast<const T*>(branch.x) + start + column);
    residual[i] = load_pack<V>(static_cast<const T*>(branch.residual) + start + column);
  }
  DropoutRow place = {};
  if (branch.dropped && width > 0) place = place_of_row(branch.dropout, at.row, 1, branch.positions);
  float v[E];
#pragma unroll
  for (int i = 0; i < E / V; ++i) {
    const int column = (at.lane + i * threads) * V;
    if (column < width) {
      branch_sum<T, V>(v + i * V, branch, norm, x[i], residual[i], place, at.row, column);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) v[i * V + k] = 0.0f;
    }
  }
  norm_held<T, V, E, Rms>(norm, at, width, v, slots);
}

// Long rows. Grid: one block of 512 threads per row.
template <typename T, int V, bool Rms>
__global__ void __launch_bounds__(kLongBlock) forward_long(Norm norm, Branch branch) {
  GPTLITE_SHARED(float, slots);
  const RowThread at(kLongBlock);
  const int64_t start = at.row * norm.width;
  DropoutRow place = {};
  if (branch.dropped) place = place_of_row(branch.dropout, at.row, 1, branch.positions);
  Moments<Rms> moments = {0.0f, 0.0f, 0.0f};
#pragma unroll 2
  for (int64_t column = static_cast<int64_t>(at.lane) * V; column < norm.width; column += kLongBlock * V) {
    float v[V];
    branch_sum<T, V>(v, branch, norm, load_pack<V>(static_cast<const T*>(branch.x) + start + column),
                     load_pack<V>(static_cast<const T*>(branch.residual) + start + column), place, at.row, column);
    moments.template add<V>(v);
  }
  // No barrier is needed before h is read again: a thread reads only elements that it wrote.
  norm_long<T, V, Rms>(norm, at, static_cast<const T*>(branch.h), moments, slots);
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_residual_norm_forward(void* y, void* h, float* mean, float* rstd, const void* x, const void* bias,
                                       const void* residual, const void* weight, const void* beta, int64_t batch,
                                       int64_t positions, int64_t width, float eps, const GptliteDropout* dropout,
                                       int dtype, int weight_dtype, float* amax, void* stream) {
  using namespace gptlite;
  if (!is_float_dtype(weight_dtype)) return static_cast<int>(cudaErrorInvalidValue);
  if (width == 0) return 0;
  const int64_t rows = batch * positions;
  const Norm norm = {y, mean, rstd, weight, beta, weight_dtype, rows, width, eps,
                     1.0f / static_cast<float>(width), amax};
  Branch branch = {h, x, bias, residual, positions, dropout != nullptr, {}};
  if (dropout != nullptr) branch.dropout = *dropout;
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const bool packs = rows_in_packs<T>(width) && aligned(y, h, x, bias, residual, weight, beta);
    return by_layout<T>(packs, width, [&](auto layout) {
      constexpr int V = decltype(layout)::V, E = decltype(layout)::E;
      const RowGrid grid = row_grid(rows, width, E);
      return by_norm(mean == nullptr, [&](auto rms) {
        constexpr bool Rms = decltype(rms)::value;
        if constexpr (E == 0)
          return launch(forward_long<T, V, Rms>, grid.blocks, grid.block, kNormShared, stream, norm, branch);
        else
          return launch(forward_held<T, V, E, Rms>, grid.blocks, grid.block, kNormShared, stream, norm, branch,
                        grid.threads);
      });
    });
  });
}
