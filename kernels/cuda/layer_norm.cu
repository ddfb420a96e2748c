// Layer norm (Ba et al., arXiv:1607.06450) and RMS norm (Zhang and Sennrich, arXiv:1910.07467), forward and backward:
// y = (x - mean) * rstd * weight + bias, and for an RMS norm y = x * rstd * weight.
//
// Traffic of the forward pass: a row is read once into registers (row.cuh), reduced twice (the mean, then the squared
// deviations; for an RMS norm only the squares) and written once. That is 2 elements moved per element, the minimum;
// weight and bias come from the caches. Rows wider than 8192 are read twice. The backward pass is in norm_backward.cuh.
#include "layer_norm.cuh"
#include "norm_backward.cuh"

namespace gptlite {
namespace {

// Held rows. Grid and block: see row_grid. A thread holds E elements of its row.
template <typename T, int V, int E, bool Rms>
__global__ void __launch_bounds__(kMostThreads<E>) forward_held(Norm norm, const T* x, int threads) {
  GPTLITE_SHARED(float, slots);
  const RowThread at(threads);
  const int width = at.row < norm.rows ? static_cast<int>(norm.width) : 0;
  Pack<T, V> packs[E / V];
  float v[E];
#pragma unroll
  for (int i = 0; i < E / V; ++i) {
    const int column = (at.lane + i * threads) * V;
    if (column < width) packs[i] = load_pack<V>(x + at.row * norm.width + column);
  }
#pragma unroll
  for (int k = 0; k < E; ++k)
    v[k] = (at.lane + k / V * threads) * V < width ? packs[k / V].at(k % V) : 0.0f;
  norm_held<T, V, E, Rms>(norm, at, width, v, slots);
}

// Long rows. Grid: one block of 512 threads per row.
template <typename T, int V, bool Rms>
__global__ void __launch_bounds__(kLongBlock) forward_long(Norm norm, const T* x) {
  GPTLITE_SHARED(float, slots);
  const RowThread at(kLongBlock);
  Moments<Rms> moments = {0.0f, 0.0f, 0.0f};
#pragma unroll 4
  for (int64_t column = static_cast<int64_t>(at.lane) * V; column < norm.width; column += kLongBlock * V) {
    float v[V];
    load_floats<V>(v, x + at.row * norm.width + column);
    moments.template add<V>(v);
  }
  norm_long<T, V, Rms>(norm, at, x, moments, slots);
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_layer_norm_forward(void* y, float* mean, float* rstd, const void* x, const void* weight,
                                    const void* bias, int64_t rows, int64_t width, float eps, int dtype,
                                    int weight_dtype, float* amax, void* stream) {
  using namespace gptlite;
  if (!is_float_dtype(weight_dtype)) return static_cast<int>(cudaErrorInvalidValue);
  if (width == 0) return 0;
  const Norm norm = {y, mean, rstd, weight, bias, weight_dtype, rows, width, eps,
                     1.0f / static_cast<float>(width), amax};
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return by_layout<T>(rows_in_packs<T>(width) && aligned(y, x, weight, bias), width, [&](auto layout) {
      constexpr int V = decltype(layout)::V, E = decltype(layout)::E;
      const RowGrid grid = row_grid(rows, width, E);
      const T* in = static_cast<const T*>(x);
      return by_norm(mean == nullptr, [&](auto rms) {
        constexpr bool Rms = decltype(rms)::value;
        if constexpr (E == 0)
          return launch(forward_long<T, V, Rms>, grid.blocks, grid.block, kNormShared, stream, norm, in);
        else
          return launch(forward_held<T, V, E, Rms>, grid.blocks, grid.block, kNormShared, stream, norm, in,
                        grid.threads);
      });
    });
  });
}

int gptlite_cuda_layer_norm_backward(void* dx, void* dweight, void* dbias, float* workspace, const void* dy,
                                     const void* x, const void* weight, const float* mean, const float* rstd,
                                     int64_t rows, int64_t width, int dtype, int weight_dtype, void* stream) {
  using namespace gptlite;
  NormGradient g = {};
  g.dh = dx;
  g.parts = workspace;
  g.dy = dy;
  g.h = x;
  g.weight = weight;
  g.weight_dtype = weight_dtype;
  g.mean = mean;
  g.rstd = rstd;
  g.rows = rows;
  g.width = width;
  if (mean == nullptr && rows > 0)  // with 0 rows, `mean` may be NULL for a layer norm too
    return norm_backward<false, true, 1>(g, {dweight}, dtype, stream);
  return norm_backward<false, false, 2>(g, {dweight, dbias}, dtype, stream);
}
