// The backward pass of layer norm, alone or after a residual sum with dropout: what layer_norm.cu and residual_norm.cu
// share.
//
// Rows of up to 8192: two stages. In the first, a processor's few blocks walk all rows. A group of threads (row.cuh)
// holds a row of x and dy in registers, reduces its two sums at once and writes the row of dx; dweight and dbias of the
// group's columns stay in registers from row to row, and the next row of x and dy is on its way while this one is
// worked on, the registers allowing (16 bits, two sums). At the end the groups of a block are added up in shared
// memory, and the block writes its parts, at most 256 in all; column_sums.cu adds those up. So 3 elements are moved for
// each, the least there is, and 16 bytes a column and block for the parts. Longer rows, and three sums of rows that
// aren't aligned: a block walks its rows one by one, reads each twice, and keeps its parts in the L2 cache.
#pragma once

#include "columns.cuh"
#include "dropout.cuh"

namespace gptlite {

struct NormGradient {
  void* dx;        // dh dropped out; NULL without dropout
  void* dh;        // the whole gradient of h
  float* parts;    // dweight's, dbias's and those of the bias before the norm
  const void* dy;  // or NULL
  const void* add;  // of dh, from elsewhere, or NULL
  const void* h;
  const void* weight;
  const float* mean;
  const float* rstd;
  int64_t rows;
  int64_t width;
  int64_t positions;
  GptliteDropout dropout;  // where dx is
  int weight_dtype;
};

constexpr int kGradientBlock = 256;  // threads, of which a processor has room for two: 128 registers a thread

// Elements of a row for each thread.
template <int V>
constexpr int kGradientElements = V == 1 ? 8 : 16;

// Template parameters below: T, V: the elements, and how many go at once. Residual: there is a residual sum, perhaps
// with dropout. Sums: 2, or 3 where the gradient of the bias before the norm is wanted too.

// A row's packs of x and dy.
template <typename T, int V>
struct GradientRow {
  Pack<T, V> h[kGradientElements<V> / V];
  Pack<T, V> dy[kGradientElements<V> / V];
  float mean;
  float rstd;

  __device__ __forceinline__ void load(const NormGradient& g, int64_t row, int lane, int threads) {
    const int width = row < g.rows ? static_cast<int>(g.width) : 0;
    const int64_t start = row * g.width;
#pragma unroll
    for (int i = 0; i < kGradientElements<V> / V; ++i) {
      const int column = (lane + i * threads) * V;
      dy[i] = Pack<T, V>{};
      h[i] = Pack<T, V>{};
      if (column >= width) continue;
      h[i] = load_pack<V>(static_cast<const T*>(g.h) + start + column);
      if (g.dy != nullptr) dy[i] = load_pack<V>(static_cast<const T*>(g.dy) + start + column);
    }
    mean = width > 0 ? g.mean[row] : 0.0f;
    rstd = width > 0 ? g.rstd[row] : 0.0f;
  }

  __device__ __forceinline__ float dy_at(int k) const { return to_float(dy[k / V].value[k % V]); }
  __device__ __forceinline__ float xhat_at(int k) const { return (to_float(h[k / V].value[k % V]) - mean) * rstd; }
};

// The gradient of h for a pack, from xhat and dy * weight in its place. c: rstd, mean of dy * weight, mean of that *
// xhat.
template <typename T, int V, bool Residual>
__device__ __forceinline__ void store_gradient(const NormGradient& g, int64_t row, int64_t column, float* v,
                                               const DropoutRow& place) {
  const int64_t at = row * g.width + column;
  if constexpr (Residual) {
    if (g.add != nullptr) {
      float add[V];
      load_floats<V>(add, static_cast<const T*>(g.add) + at);
#pragma unroll
      for (int k = 0; k < V; ++k) v[k] += add[k];
    }
  }
  store_floats<V>(static_cast<T*>(g.dh) + at, v);
  if constexpr (Residual) {
    if (g.dx == nullptr) return;
    drop<V>(v, g.dropout, place, column);
    store_floats<V>(static_cast<T*>(g.dx) + at, v);
  }
}

// Adds up the sums of a block's groups of threads, in order, and writes the block's part of each.
template <int V, int Sums>
__device__ __forceinline__ void store_parts(const NormGradient& g, float (&sum)[Sums][kGradientElements<V>],
                                            int threads, float* shared) {
  constexpr int E = kGradientElements<V>;
  for (int offset = threads; offset < kWarp; offset *= 2) {
#pragma unroll
    for (int k = 0; k < Sums * E; ++k)
      sum[k / E][k % E] += __shfl_xor_sync(kAllLanes, sum[k / E][k % E], offset);
  }
  const int unit_threads = threads < kWarp ? kWarp : threads, unit = threadIdx.x / unit_threads;
  const int units = blockDim.x / unit_threads, lane = threadIdx.x % unit_threads, width = static_cast<int>(g.width);
  for (int turn = 0; turn < units; ++turn) {
    if (unit == turn && lane < threads) {
#pragma unroll
      for (int k = 0; k < Sums * E; ++k) {
        const int which = k / E, element = k % E;
        const int column = (lane + element / V * threads) * V;
        if (column >= width) continue;
        const float total = (turn > 0 ? shared[which * width + column + element % V] : 0.0f) + sum[which][element];
        if (turn + 1 < units)
          shared[which * width + column + element % V] = total;
        else
          g.parts[(static_cast<int64_t>(which) * gridDim.x + blockIdx.x) * width + column + element % V] = total;
      }
    }
    __syncthreads();
  }
}

// A pack's weights; zeros past the row's end.
template <int V>
__device__ __forceinline__ void load_weight(float* weight, const NormGradient& g, int column) {
#pragma unroll
  for (int k = 0; k < V; ++k) weight[k] = 0.0f;
  if (column < g.width) load_floats<V>(weight, g.weight, g.weight_dtype, column);
}

template <typename T, int V, bool Residual, int Sums>
__global__ void __launch_bounds__(kLongBlock) norm_backward_held(NormGradient g, int threads) {
  GPTLITE_SHARED(float, shared);
  constexpr int E = kGradientElements<V>;
  constexpr bool kAhead = sizeof(T) == 2 && V > 1 && Sums == 2;
  constexpr bool kKeepWeight = !Residual;  // registers are short: weights come from the cache every time
  const RowThread at(threads);
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / threads);
  const float inverse_width = 1.0f / static_cast<float>(g.width);
  float sum[Sums][E] = {}, weight[E];
#pragma unroll
  for (int i = 0; i < E && kKeepWeight; i += V) load_weight<V>(weight + i, g, at.lane * V + i * threads);
  GradientRow<T, V> held, next;
  held.load(g, at.row, at.lane, threads);
  int64_t row = at.row;
  int turn = 0;
  // A block's groups take as many turns, for they meet in the reduction: as many as its first.
  for (int64_t first = row - threadIdx.x / threads; first < g.rows; first += step, row += step, turn ^= 1) {
    if (kAhead) next.load(g, row + step, at.lane, threads);
    float c[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < E; i += V) {
      if (!kKeepWeight) load_weight<V>(weight + i, g, at.lane * V + i * threads);
#pragma unroll
      for (int k = i; k < i + V; ++k) {
        const float dy = held.dy_at(k), xhat = held.xhat_at(k);
        sum[0][k] = fmaf(dy, xhat, sum[0][k]);
        sum[1][k] += dy;
        c[0] = fmaf(dy, weight[k], c[0]);
        c[1] = fmaf(dy * weight[k], xhat, c[1]);
      }
    }
    group_reduce<Sum>(c, threads, shared + turn * 2 * kMaxWarps);
    DropoutRow place = {};
    if (Residual && g.dx != nullptr && row < g.rows) place = place_of_row(g.dropout, row, 1, g.positions);
#pragma unroll
    for (int i = 0; i < E; i += V) {
      const int column = at.lane * V + i * threads;
      if (row >= g.rows || column >= g.width) continue;
      if (!kKeepWeight) load_weight<V>(weight + i, g, column);
      float v[V];
#pragma unroll
      for (int k = 0; k < V; ++k)
        v[k] = held.rstd * (held.dy_at(i + k) * weight[i + k] - (c[0] + held.xhat_at(i + k) * c[1]) * inverse_width);
      store_gradient<T, V, Residual>(g, row, column, v, place);
      if constexpr (Sums == 3) {
#pragma unroll
        for (int k = 0; k < V; ++k) sum[2][i + k] += v[k];
      }
    }
    if (kAhead)
      held = next;
    else
      held.load(g, row + step, at.lane, threads);
  }
  store_parts<V, Sums>(g, sum, threads, shared + 4 * kMaxWarps);
}

// Adds v to a part of a sum; at the block's first row, writes it. A thread keeps to its columns, so only it is
// concerned.
template <int V>
__device__ __forceinline__ void add_to_part(const NormGradient& g, int which, int64_t column, const float* v,
                                            bool first) {
  float part[V] = {};
  float* at = g.parts + (static_cast<int64_t>(which) * gridDim.x + blockIdx.x) * g.width + column;
  if (!first) load_floats<V>(part, at);
#pragma unroll
  for (int k = 0; k < V; ++k) part[k] += v[k];
  store_floats<V>(at, part);
}

// A pack of dy and of h, normed, and its weights.
template <typename T, int V>
struct GradientPack {
  float dy[V];
  float xhat[V];
  float weight[V];

  __device__ __forceinline__ GradientPack(const NormGradient& g, int64_t row, int64_t column, float mean, float rstd) {
    const int64_t at = row * g.width + column;
#pragma unroll
    for (int k = 0; k < V; ++k) dy[k] = 0.0f;
    if (g.dy != nullptr) load_floats<V>(dy, static_cast<const T*>(g.dy) + at);
    load_floats<V>(xhat, static_cast<const T*>(g.h) + at);
    load_floats<V>(weight, g.weight, g.weight_dtype, column);
#pragma unroll
    for (int k = 0; k < V; ++k) xhat[k] = (xhat[k] - mean) * rstd;
  }
};

template <typename T, int V, bool Residual, int Sums>
__global__ void __launch_bounds__(kLongBlock) norm_backward_long(NormGradient g) {
  GPTLITE_SHARED(float, slots);
  const int64_t start = static_cast<int64_t>(threadIdx.x) * V, step = kLongBlock * V;
  const float inverse_width = 1.0f / static_cast<float>(g.width);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < g.rows; row += gridDim.x, turn ^= 1) {
    const float mean = g.mean[row], rstd = g.rstd[row];
    float c[2] = {0.0f, 0.0f};
#pragma unroll (sizeof(T) < 4 ? 2 : 1)  // registers
    for (int64_t column = start; column < g.width; column += step) {
      const GradientPack<T, V> pack(g, row, column, mean, rstd);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        c[0] = fmaf(pack.dy[k], pack.weight[k], c[0]);
        c[1] = fmaf(pack.dy[k] * pack.weight[k], pack.xhat[k], c[1]);
      }
    }
    group_reduce<Sum>(c, kLongBlock, slots + turn * 2 * kMaxWarps);
    DropoutRow place = {};
    if (Residual && g.dx != nullptr) place = place_of_row(g.dropout, row, 1, g.positions);
    for (int64_t column = start; column < g.width; column += step) {
      const GradientPack<T, V> pack(g, row, column, mean, rstd);
      float v[V];
#pragma unroll
      for (int k = 0; k < V; ++k) v[k] = pack.dy[k] * pack.xhat[k];
      const bool first = row == blockIdx.x;
      add_to_part<V>(g, 0, column, v, first);
      add_to_part<V>(g, 1, column, pack.dy, first);
#pragma unroll
      for (int k = 0; k < V; ++k)
        v[k] = rstd * (pack.dy[k] * pack.weight[k] - (c[0] + pack.xhat[k] * c[1]) * inverse_width);
      store_gradient<T, V, Residual>(g, row, column, v, place);
      if constexpr (Sums == 3) add_to_part<V>(g, 2, column, v, first);
    }
  }
}

// Threads of a block: 256, or 512 where more rows fit into those, or the row is longer.
inline int gradient_block(int threads) {
  const int two = 2 * (kGradientBlock / threads), one = kLongBlock / threads;
  return two >= one ? kGradientBlock / threads * threads : one * threads;
}

template <typename T, int V, bool Residual, int Sums>
int launch_held(const NormGradient& g, int64_t* count, void* stream) {
  const int threads = row_threads(g.width, kGradientElements<V>), block = gradient_block(threads);
  const int groups = block / threads;
  const int64_t most = processors() * (block > kGradientBlock ? 1 : 2), needed = divide_up(g.rows, groups);
  int64_t blocks = needed < most ? needed : most;
  *count = blocks < kMaxParts ? blocks : kMaxParts;
  const bool together = block > (threads < kWarp ? kWarp : threads);
  const int64_t shared = 4 * kMaxWarps + (together ? Sums * g.width : 0);
  return launch(norm_backward_held<T, V, Residual, Sums>, *count, block, shared * sizeof(float), stream, g, threads);
}

template <typename T, int V, bool Residual, int Sums>
int launch_long(const NormGradient& g, int64_t* count, void* stream) {
  *count = g.rows < kMaxParts ? g.rows : kMaxParts;
  constexpr int64_t kShared = 4 * kMaxWarps * sizeof(float);
  return launch(norm_backward_long<T, V, Residual, Sums>, *count, kLongBlock, kShared, stream, g);
}

template <bool Residual, int Sums>
int norm_backward(const NormGradient& g, void* dweight, void* dbias, void* dbefore, int dtype, void* stream) {
  if (!is_float_dtype(g.weight_dtype)) return static_cast<int>(cudaErrorInvalidValue);
  if (g.width == 0) return 0;
  ColumnSums sums = {{dweight, dbias, dbefore}, g.parts, 0, g.width, g.weight_dtype};
  const int error = by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int V = kFullPack<T>;
    if (g.width % V == 0 && aligned(g.dx, g.dh, g.parts, g.dy, g.add, g.h, g.weight))
      return g.width > kHeldWidth ? launch_long<T, V, Residual, Sums>(g, &sums.count, stream)
                                  : launch_held<T, V, Residual, Sums>(g, &sums.count, stream);
    if constexpr (Sums == 2) {
      if (g.width <= kHeldSingly) return launch_held<T, 1, Residual, Sums>(g, &sums.count, stream);
    }
    return launch_long<T, 1, Residual, Sums>(g, &sums.count, stream);
  });
  return error != 0 ? error : add_parts(sums, stream);
}

}  // namespace gptlite
