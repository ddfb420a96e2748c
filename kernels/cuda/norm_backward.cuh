// Backward pass of layer norm and of RMS norm (Rms), alone or after a residual sum with dropout. Shared by layer_norm.cu
// and residual_norm_backward.cu. For the normalized rows y = xhat * weight + bias, with xhat = (h - mean) * rstd:
//   dh = rstd * (dy * weight - mean of (dy * weight) - xhat * mean of (dy * weight * xhat))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
// An RMS norm has mean 0, and neither the first of the two means nor dbias.
//
// Held rows, of up to 8192 elements, take two stages. In the first, one or two blocks per multiprocessor loop over all
// rows. A group of threads (row.cuh) holds a row of h and dy in registers, reduces both sums at once and writes the row
// of dh. Its sums for dweight and dbias stay in registers from row to row. The weights are in shared memory, as floats.
// Each pack of the next row is loaded into the registers of this row's pack as soon as the latter is used. Rows of 513
// to 1024 elements of 16 bits take one warp, with 24 or 32 elements per thread, so no thread waits for another warp. At
// the end, a block adds the sums of its groups in shared memory and writes them as parts. There are at most 256 parts
// per sum, which column_sums.cu adds in the second stage. Traffic: 3 elements moved per element, the minimum, and for
// the parts 16 bytes per column and block.
//
// Longer rows, and unaligned rows with three sums: a block loops over its rows one by one, reads each row twice, and
// updates its parts in memory, where they stay in the L2 cache.
#pragma once

#include "amax.cuh"
#include "columns.cuh"
#include "dropout.cuh"

namespace gptlite {

struct NormGradient {
  void* dx;        // dh after dropout; NULL without dropout
  void* dh;        // the complete gradient of h
  float* parts;    // of dweight, dbias (not for an RMS norm) and the bias before the norm
  const void* dy;  // or NULL
  const void* add;  // gradient of h from other uses, or NULL
  const void* h;
  const void* weight;  // may be NULL for an RMS norm
  const float* mean;   // NULL for an RMS norm
  const float* rstd;
  int64_t rows;
  int64_t width;
  int64_t positions;
  GptliteDropout dropout;  // used if dx is not NULL
  int weight_dtype;
  float* amax;          // of dx, or of dh if dx is NULL; or NULL
  float inverse_width;  // set below; avoids a division, which takes registers and stack
};

// Operation before the norm: nothing; a residual sum, so that dh has the gradient `add` added; or dropout and then the
// sum.
enum class Before { nothing, sum, dropout };

// Template parameters below: T is the element type, V the number of elements of a pack, Sums the number of column sums:
// dweight, dbias (not for an RMS norm), and the gradient of the bias before the norm if kSumBefore.
template <bool Rms, int Sums>
constexpr bool kSumBefore = Sums == (Rms ? 2 : 3);

// E: elements of a row that a thread holds. Warp: a row takes exactly one warp, known at compile time, which saves
// barriers and address arithmetic.
template <int E_, bool Warp_>
struct GradientLayout {
  static constexpr int E = E_;
  static constexpr bool Warp = Warp_;
};

// Number of threads in the largest block, which fills the registers of a multiprocessor alone: a thread holds E
// elements of each sum and of h, dy and dh. The numbers are the largest without register spills. Rows that need more
// threads are processed as long rows.
template <int E, Before B, int Sums>
constexpr int kGradientBlock = E < 16    ? 448
                               : E == 16 ? (B == Before::dropout && Sums == 3 ? 384 : 512)
                               : E == 24 ? (B == Before::nothing ? 512 : 384)
                                         : (Sums <= 2 ? 384 : 256);

// Returns the position of a thread's element k in shared memory. Four consecutive floats belong to one thread and the
// next four to the next thread, which avoids bank conflicts.
template <int V>
__device__ __forceinline__ int held_at(int k, int lane, int threads) {
  if constexpr (V == 1) return k * threads + lane;
  return (k / 4 * threads + lane) * 4 + k % 4;
}

// A thread's packs of a row of h, dy and (if Add) the gradient that is added to dh. Packs past the row's end are zeros.
template <typename T, int V, int E, bool Add>
struct GradientRow {
  static constexpr int kPacks = E / V;
  Pack<T, V> h[kPacks] = {};
  Pack<T, V> dy[kPacks] = {};
  Pack<T, V> add[Add ? kPacks : 1] = {};

  __device__ __forceinline__ void load(const NormGradient& g, int i, int64_t at, bool wanted) {
    load_pack_if<V>(wanted, h[i], static_cast<const T*>(g.h) + at);
    load_pack_if<V>(wanted && g.dy != nullptr, dy[i], static_cast<const T*>(g.dy) + at);
    if (Add) load_pack_if<V>(wanted && g.add != nullptr, add[i], static_cast<const T*>(g.add) + at);
  }
};

// Loads the weights of columns column to column + V - 1: ones if an RMS norm has no weight.
template <int V, bool Rms>
__device__ __forceinline__ void load_weight(float* weight, const NormGradient& g, int64_t column) {
  if constexpr (Rms) {
#pragma unroll
    for (int k = 0; k < V; ++k) weight[k] = 1.0f;
    if (g.weight == nullptr) return;
  }
  load_floats<V>(weight, g.weight, g.weight_dtype, column);
}

template <typename T, int V>
__device__ __forceinline__ void add_pack(float* v, const NormGradient& g, int64_t at) {
  if (g.add == nullptr) return;
  float add[V];
  load_floats<V>(add, static_cast<const T*>(g.add) + at);
#pragma unroll
  for (int k = 0; k < V; ++k) v[k] += add[k];
}

// Adds one column sum over the block's groups of threads, in a fixed order, and writes it as the block's part. `shared`
// has E floats per thread of the block.
template <int V, int E>
__device__ __forceinline__ void store_part_of_groups(float* parts, float (&sum)[E], int width, int threads,
                                                     float* shared) {
  for (int offset = threads; offset < kWarp; offset *= 2) {
#pragma unroll
    for (int k = 0; k < E; ++k) sum[k] += __shfl_xor_sync(kAllLanes, sum[k], offset);
  }
  const int unit = threads < kWarp ? kWarp : threads, units = blockDim.x / unit, held = threads * E;
  const int lane = threadIdx.x % unit;
  __syncthreads();  // until the previous sum has been read from `shared`
#pragma unroll
  for (int k = 0; lane < threads && k < E; ++k)
    shared[threadIdx.x / unit * held + held_at<V>(k, lane, threads)] = sum[k];
  __syncthreads();
  constexpr int kStore = V == 1 ? 1 : 4;
  for (int first = threadIdx.x * kStore; first < held; first += blockDim.x * kStore) {
    // The inverse of held_at.
    const int at = first / kStore % threads, k = first / kStore / threads * kStore;
    const int column = (at + k / V * threads) * V + k % V;
    if (column >= width) continue;
    float total[kStore] = {};
    for (int u = 0; u < units; ++u) {
#pragma unroll
      for (int i = 0; i < kStore; ++i) total[i] += shared[u * held + first + i];
    }
    store_floats<kStore>(parts + column, total);
  }
}

// Held rows. Grid: one or two blocks per multiprocessor, and at most 256. Block: whole groups of row_threads threads,
// one row per group, up to kGradientBlock threads. A group advances by `step` rows.
template <typename T, int V, typename Layout, Before B, bool Rms, int Sums>
__global__ void __launch_bounds__(kGradientBlock<Layout::E, B, Sums>)
    norm_backward_held(NormGradient g, int row_threads) {
  GPTLITE_SHARED(float, shared);
  constexpr int E = Layout::E, kProduct = Rms ? 0 : 1;  // kProduct: index of the sum dy*w*xhat
  constexpr bool kHoldAdd = B == Before::sum && sizeof(T) == 2 && V > 1;  // limited by registers
  const int threads = Layout::Warp ? kWarp : row_threads;
  const RowThread at(threads);
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / threads);
  const int width = static_cast<int>(g.width), across = threads * V, column = at.lane * V;
  float* weights = shared + 4 * kMaxWarps;
  float sum[Sums][E] = {};
  GradientRow<T, V, E, kHoldAdd> held;
  const bool any = at.row < g.rows;
  float mean = !Rms && any ? g.mean[at.row] : 0.0f, rstd = any ? g.rstd[at.row] : 0.0f;
#pragma unroll
  for (int i = 0; i < E / V; ++i)
    held.load(g, i, at.row * width + column + i * across, any && column + i * across < width);
  // Weights go to shared memory, because registers are scarce, as floats, so that they are converted only once.
#pragma unroll 1
  for (int i = 0; static_cast<int>(threadIdx.x) < threads && i < E / V; ++i) {
    float weight[V] = {};
    if (column + i * across < width) load_weight<V, Rms>(weight, g, column + i * across);
#pragma unroll
    for (int k = 0; k < V; ++k) weights[held_at<V>(i * V + k, at.lane, threads)] = weight[k];
  }
  __syncthreads();
  Amax<T> amax(B == Before::nothing ? nullptr : g.amax);
  int64_t row = at.row;
  int turn = 0;
  // All groups of a block run as many iterations as its first group, because the reduction has a barrier. A group with
  // `row` past the last row takes part in the reduction, but neither adds nor writes anything.
  for (int64_t first = row - threadIdx.x / threads; first < g.rows; first += step, row += step, turn ^= 1) {
    const float shift = -mean * rstd;
    float c[kProduct + 1] = {};
    if (row < g.rows) {
#pragma unroll
      for (int k = 0; k < E; ++k) {
        const float dy = held.dy[k / V].at(k % V), h = held.h[k / V].at(k % V);
        const float xhat = Rms ? h * rstd : fmaf(h, rstd, shift);
        const float scaled = dy * weights[held_at<V>(k, at.lane, threads)];
        sum[0][k] = fmaf(dy, xhat, sum[0][k]);
        if constexpr (!Rms) sum[1][k] += dy, c[0] += scaled;
        c[kProduct] = fmaf(scaled, xhat, c[kProduct]);
      }
    }
    group_reduce<Sum>(c, threads, shared + turn * 2 * kMaxWarps);
    if (row >= g.rows) continue;
    DropoutRow place = {};
    if (B == Before::dropout) place = place_of_row(g.dropout, row, 1, g.positions);
    // dh = rstd * (dy * weight - (c[0] + xhat * c[1]) / width), expanded to a linear function of h.
    const float scale = rstd, slope = -rstd * rstd * c[kProduct] * g.inverse_width;
    const float constant = Rms ? 0.0f : -rstd * c[0] * g.inverse_width - mean * slope;
    const bool more = row + step < g.rows;
    if (!Rms && more) mean = g.mean[row + step];
    if (more) rstd = g.rstd[row + step];
#pragma unroll
    for (int i = 0; i < E / V; ++i) {
      const int64_t place_at = row * width + column + i * across;
      if (column + i * across >= width) continue;
      float v[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const float scaled = held.dy[i].at(k) * weights[held_at<V>(i * V + k, at.lane, threads)];
        v[k] = fmaf(scaled, scale, Rms ? held.h[i].at(k) * slope : fmaf(held.h[i].at(k), slope, constant));
        if (kHoldAdd) v[k] += held.add[i].at(k);
      }
      // This pack is used up: load the next row's pack into its registers.
      held.load(g, i, place_at + step * width, more);
      if (B != Before::nothing && !kHoldAdd) add_pack<T, V>(v, g, place_at);
      if constexpr (B == Before::dropout) {
        store_floats<V>(static_cast<T*>(g.dh) + place_at, v);
        drop<V>(v, g.dropout, place, column + i * across);
      }
      store_floats<V>(static_cast<T*>(B == Before::dropout ? g.dx : g.dh) + place_at, v, amax);
      if constexpr (kSumBefore<Rms, Sums>) {
#pragma unroll
        for (int k = 0; k < V; ++k) sum[Sums - 1][i * V + k] += v[k];
      }
    }
  }
  amax.write();
#pragma unroll
  for (int which = 0; which < Sums; ++which)
    store_part_of_groups<V, E>(g.parts + (static_cast<int64_t>(which) * gridDim.x + blockIdx.x) * width, sum[which],
                               width, threads, weights);
}

// Adds v to the block's part of sum `which`, or stores v if `first`, for the block's first row. No barrier is needed,
// because a thread always accesses the same columns.
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

// A pack of dy (zeros if dy is NULL), of xhat, the normalized h, and of the weights.
template <typename T, int V, bool Rms>
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
    load_weight<V, Rms>(weight, g, column);
#pragma unroll
    for (int k = 0; k < V; ++k) xhat[k] = Rms ? xhat[k] * rstd : (xhat[k] - mean) * rstd;
  }
};

// Long rows. Grid: up to 256 blocks of 512 threads, each with every gridDim.x-th row. The first loop computes the row's
// sums c, the second writes dh.
template <typename T, int V, bool Residual, bool Rms, int Sums>
__global__ void __launch_bounds__(kLongBlock) norm_backward_long(NormGradient g) {
  GPTLITE_SHARED(float, slots);
  constexpr int kProduct = Rms ? 0 : 1;
  const int64_t start = static_cast<int64_t>(threadIdx.x) * V, step = kLongBlock * V;
  int turn = 0;
  Amax<T> amax(Residual ? g.amax : nullptr);
  for (int64_t row = blockIdx.x; row < g.rows; row += gridDim.x, turn ^= 1) {
    const float mean = Rms ? 0.0f : g.mean[row], rstd = g.rstd[row];
    float c[kProduct + 1] = {};
#pragma unroll (sizeof(T) < 4 && !(Rms && V == 1) ? 2 : 1)  // limited by registers
    for (int64_t column = start; column < g.width; column += step) {
      const GradientPack<T, V, Rms> pack(g, row, column, mean, rstd);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if constexpr (!Rms) c[0] = fmaf(pack.dy[k], pack.weight[k], c[0]);
        c[kProduct] = fmaf(pack.dy[k] * pack.weight[k], pack.xhat[k], c[kProduct]);
      }
    }
    group_reduce<Sum>(c, kLongBlock, slots + turn * 2 * kMaxWarps);
    DropoutRow place = {};
    if (Residual && g.dx != nullptr) place = place_of_row(g.dropout, row, 1, g.positions);
    for (int64_t column = start; column < g.width; column += step) {
      const GradientPack<T, V, Rms> pack(g, row, column, mean, rstd);
      float v[V];
#pragma unroll
      for (int k = 0; k < V; ++k) v[k] = pack.dy[k] * pack.xhat[k];
      const bool first = row == blockIdx.x;
      add_to_part<V>(g, 0, column, v, first);
      if constexpr (!Rms) add_to_part<V>(g, 1, column, pack.dy, first);
#pragma unroll
      for (int k = 0; k < V; ++k)
        v[k] = rstd * (pack.dy[k] * pack.weight[k] -
                       (Rms ? pack.xhat[k] * c[0] : c[0] + pack.xhat[k] * c[kProduct]) * g.inverse_width);
      if (Residual) add_pack<T, V>(v, g, row * g.width + column);
      if (Residual && g.dx != nullptr) {
        store_floats<V>(static_cast<T*>(g.dh) + row * g.width + column, v);
        drop<V>(v, g.dropout, place, column);
      }
      store_floats<V>(static_cast<T*>(Residual && g.dx != nullptr ? g.dx : g.dh) + row * g.width + column, v, amax);
      if constexpr (kSumBefore<Rms, Sums>) add_to_part<V>(g, Sums - 1, column, v, first);
    }
  }
  amax.write();
}

// Returns the number of threads of a block: as many whole groups as fit into `most`. If a group has several warps,
// which wait for each other at barriers, half of that, so that two blocks share a multiprocessor, unless this holds
// fewer rows.
inline int gradient_block(int threads, int most) {
  const int one = most / threads, half = most / 2 / threads;
  return (threads > kWarp && 2 * half >= one ? half : one) * threads;
}

template <typename T, int V, bool Residual, bool Rms, int Sums>
int launch_long(const NormGradient& g, int64_t* count, void* stream) {
  *count = g.rows < kMaxParts ? g.rows : kMaxParts;
  constexpr int64_t kShared = 4 * kMaxWarps * sizeof(float);
  return launch(norm_backward_long<T, V, Residual, Rms, Sums>, *count, kLongBlock, kShared, stream, g);
}

template <typename T, int V, typename Layout, Before B, bool Rms, int Sums>
int launch_layout(const NormGradient& g, int64_t* count, void* stream) {
  constexpr int E = Layout::E, kMost = kGradientBlock<E, B, Sums>;
  const auto kernel = norm_backward_held<T, V, Layout, B, Rms, Sums>;
  const int threads = row_threads(g.width, E);
  if (threads > kMost) return launch_long<T, V, B != Before::nothing, Rms, Sums>(g, count, stream);
  const int block = gradient_block(threads, kMost);
  const int64_t most = processors() * (2 * block > kMost ? 1 : 2), needed = divide_up(g.rows, block / threads);
  const int64_t blocks = needed < most ? needed : most;
  *count = blocks < kMaxParts ? blocks : kMaxParts;
  const int64_t shared = (4 * kMaxWarps + static_cast<int64_t>(block) * E) * static_cast<int64_t>(sizeof(float));
  if (!allow_shared(kernel, shared)) return static_cast<int>(cudaErrorInvalidValue);
  return launch(kernel, *count, block, shared, stream, g, threads);
}

// Chooses the layout of held rows. Rows of 513 to 1024 elements take one warp. Wider rows have 32 elements per thread,
// unless 16 per thread leave fewer unused. More than 16 fit into the registers only for 16-bit elements, and with
// dropout the gain would be small.
template <typename T, int V, Before B, bool Rms, int Sums>
int launch_held(const NormGradient& g, int64_t* count, void* stream) {
  if constexpr (V == 1) {
    return launch_layout<T, V, GradientLayout<8, false>, B, Rms, Sums>(g, count, stream);
  } else {
    if constexpr (sizeof(T) == 2 && B != Before::dropout) {
      const auto held = [&](int elements) { return elements * row_threads(g.width, elements); };
      if (g.width > 16 * kWarp && g.width <= 24 * kWarp)
        return launch_layout<T, V, GradientLayout<24, true>, B, Rms, Sums>(g, count, stream);
      if (g.width > 24 * kWarp && g.width <= 32 * kWarp)
        return launch_layout<T, V, GradientLayout<32, true>, B, Rms, Sums>(g, count, stream);
      if (g.width > 32 * kWarp && held(32) <= held(16))
        return launch_layout<T, V, GradientLayout<32, false>, B, Rms, Sums>(g, count, stream);
    }
    return launch_layout<T, V, GradientLayout<16, false>, B, Rms, Sums>(g, count, stream);
  }
}

template <typename T, int V, bool Residual, bool Rms, int Sums>
int launch_held(const NormGradient& g, int64_t* count, void* stream) {
  if constexpr (!Residual) return launch_held<T, V, Before::nothing, Rms, Sums>(g, count, stream);
  else if (g.dx == nullptr) return launch_held<T, V, Before::sum, Rms, Sums>(g, count, stream);
  else return launch_held<T, V, Before::dropout, Rms, Sums>(g, count, stream);
}

// Launches both stages. out[i] is where column sum i is written, or NULL.
template <bool Residual, bool Rms, int Sums>
int norm_backward(NormGradient g, void* const (&out)[Sums], int dtype, void* stream) {
  if (!is_float_dtype(g.weight_dtype)) return static_cast<int>(cudaErrorInvalidValue);
  if (g.width == 0) return 0;
  g.inverse_width = 1.0f / static_cast<float>(g.width);
  ColumnSums sums = {{}, g.parts, 0, g.width, g.weight_dtype};
  for (int which = 0; which < Sums; ++which) sums.out[which] = out[which];
  const int error = by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int V = kFullPack<T>;
    if (g.width % V == 0 && aligned(g.dx, g.dh, g.parts, g.dy, g.add, g.h, g.weight))
      return g.width > kHeldWidth ? launch_long<T, V, Residual, Rms, Sums>(g, &sums.count, stream)
                                  : launch_held<T, V, Residual, Rms, Sums>(g, &sums.count, stream);
    if constexpr (!kSumBefore<Rms, Sums>) {
      if (g.width <= kHeldSingly) return launch_held<T, 1, Residual, Rms, Sums>(g, &sums.count, stream);
    }
    return launch_long<T, 1, Residual, Rms, Sums>(g, &sums.count, stream);
  });
  return error != 0 ? error : add_parts(sums, stream);
}

}  // namespace gptlite
