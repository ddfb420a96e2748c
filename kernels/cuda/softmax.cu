// Softmax of attention scores, forward and backward, with an arbitrary mask tensor or the causal mask:
// y = softmax(scale * x + mask), and dx = scale * y * (dy - sum(dy * y)).
//
// Forward: a row is read once into registers (row.cuh), scaled, masked, reduced twice (maximum, sum of exponentials)
// and written once. That is 2 elements moved per element, the minimum, plus the bytes of the mask. With the causal mask
// only visible elements are read, about half of them for a square matrix; the hidden ones are written as zeros.
// Backward: y and dy are read once, reduced once, and dx is written: 3 elements moved. Rows wider than 8192 are read
// twice, the second time mostly from the L2 cache. Their forward pass is an online softmax (running maximum,
// arXiv:1805.02867).
#include "row.cuh"

namespace gptlite {
namespace {

// Scores [matrices, queries, keys]. With a mask, matrices is batch * heads.
struct Scores {
  int64_t rows;
  int64_t keys;
  int64_t queries;
  int64_t heads;
  int64_t stride[4];  // strides of the mask
  const void* mask;
  int mask_dtype;
  bool causal;
  float scale;
};

// Returns how many keys the row sees, or 0 if the thread has no row.
__device__ __forceinline__ int64_t seen_keys(const Scores& s, int64_t row) {
  if (row >= s.rows) return 0;
  if (!s.causal) return s.keys;
  int64_t matrix, query;
  divide(row, s.queries, &matrix, &query);
  const int64_t seen = query + s.keys - s.queries + 1;
  return seen < 0 ? 0 : seen;
}

// Returns the index of the row's first element in the mask.
__device__ __forceinline__ int64_t mask_row(const Scores& s, int64_t row) {
  if (s.mask_dtype == GPTLITE_NONE || row >= s.rows) return 0;
  int64_t matrix, query, batch, head;
  divide(row, s.queries, &matrix, &query);
  divide(matrix, s.heads, &batch, &head);
  return batch * s.stride[0] + head * s.stride[1] + query * s.stride[2];
}

// Masks the scores of columns column to column + V - 1, all within the row. With V > 1, the mask must be contiguous
// along keys and aligned to packs (mask_in_packs).
template <int V>
__device__ __forceinline__ void add_mask(float* v, const Scores& s, int64_t mask_at, int64_t column) {
  if (s.mask_dtype == GPTLITE_NONE) return;
  const int64_t at = mask_at + column * s.stride[3];
  if (s.mask_dtype == GPTLITE_BOOL) {
    const Pack<uint8_t, V> hidden = load_pack<V>(static_cast<const uint8_t*>(s.mask) + at);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] = hidden.at(k) != 0 ? -INFINITY : v[k];
    return;
  }
  float added[V];
  load_floats<V>(added, s.mask, s.mask_dtype, at);
#pragma unroll
  for (int k = 0; k < V; ++k) v[k] += added[k];
}

// Computes the scores of a pack. Scores of keys that the row does not see are -inf.
template <typename T, int V>
__device__ __forceinline__ void score(float* v, const Pack<T, V>& x, const Scores& s, int64_t mask_at, int64_t column,
                                      int64_t seen) {
#pragma unroll
  for (int k = 0; k < V; ++k) v[k] = x.at(k) * s.scale;
  add_mask<V>(v, s, mask_at, column);
#pragma unroll
  for (int k = 0; k < V; ++k) v[k] = column + k < seen ? v[k] : -INFINITY;
}

// Returns the number that is subtracted before the exponential: the maximum, or 0 if it is -inf, as -inf - -inf is NaN.
__device__ __forceinline__ float finite_base(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// Returns 1 / sum, or 0 if the sum is 0: a row in which all scores are -inf becomes zeros.
__device__ __forceinline__ float inverse(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// Held rows. Grid and block: see row_grid. A thread holds E scores of its row.
template <typename T, int V, int E>
__global__ void __launch_bounds__(kMostThreads<E>) forward_held(T* y, const T* x, Scores s, int threads) {
  GPTLITE_SHARED(float, slots);
  constexpr int kPacks = E / V;
  const RowThread at(threads);
  const int seen = static_cast<int>(seen_keys(s, at.row)), keys = at.row < s.rows ? static_cast<int>(s.keys) : 0;
  const int64_t start = at.row * s.keys, mask_at = mask_row(s, at.row);
  Pack<T, V> packs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (at.lane + i * threads) * V;
    if (column < seen) packs[i] = load_pack<V>(x + start + column);
  }
  float v[E], maximum = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (at.lane + i * threads) * V;
    if (column < seen) {
      score<T, V>(v + i * V, packs[i], s, mask_at, column, seen);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) v[i * V + k] = -INFINITY;
    }
#pragma unroll
    for (int k = 0; k < V; ++k) maximum = fmaxf(maximum, v[i * V + k]);
  }
  const float base = finite_base(group_reduce<Max>(maximum, threads, slots));
#pragma unroll
  for (int k = 0; k < E; ++k) {
    v[k] = exponential<T>(v[k] - base);
    sum += v[k];
  }
  const float factor = inverse(group_reduce<Sum>(sum, threads, slots + kMaxWarps));
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (at.lane + i * threads) * V;
#pragma unroll
    for (int k = 0; k < V; ++k) v[i * V + k] = column + k < seen ? v[i * V + k] * factor : 0.0f;
    if (column < keys) store_floats<V>(y + start + column, v + i * V);
  }
}

// Long rows. Grid: one block of 512 threads per row.
template <typename T, int V>
__global__ void __launch_bounds__(kLongBlock) forward_long(T* y, const T* x, Scores s) {
  GPTLITE_SHARED(float, slots);
  const RowThread at(kLongBlock);
  const int64_t seen = seen_keys(s, at.row), start = at.row * s.keys, mask_at = mask_row(s, at.row);
  const int64_t first = static_cast<int64_t>(at.lane) * V, step = kLongBlock * V;
  float v[V], maximum = -INFINITY, sum = 0.0f;
#pragma unroll (V == 1 ? 1 : 2)  // limited by registers
  for (int64_t column = first; column < seen; column += step) {
    score<T, V>(v, load_pack<V>(x + start + column), s, mask_at, column, seen);
    float higher = maximum;
#pragma unroll
    for (int k = 0; k < V; ++k) higher = fmaxf(higher, v[k]);
    const float base = finite_base(higher);
    sum *= exponential<T>(maximum - base);
#pragma unroll
    for (int k = 0; k < V; ++k) sum += exponential<T>(v[k] - base);
    maximum = higher;
  }
  const float base = finite_base(group_reduce<Max>(maximum, kLongBlock, slots));
  sum *= exponential<T>(maximum - base);
  // A thread that saw only -inf or NaN computed its sum with base 0 instead of its maximum. That sum is 0 or NaN with
  // any base, so the factor above does no harm.
  const float factor = inverse(group_reduce<Sum>(sum, kLongBlock, slots + kMaxWarps));
#pragma unroll (V == 1 ? 1 : 2)  // limited by registers
  for (int64_t column = first; column < s.keys; column += step) {
    if (column < seen) {
      score<T, V>(v, load_pack<V>(x + start + column), s, mask_at, column, seen);
#pragma unroll
      for (int k = 0; k < V; ++k) v[k] = column + k < seen ? exponential<T>(v[k] - base) * factor : 0.0f;
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) v[k] = 0.0f;
    }
    store_floats<V>(y + start + column, v);
  }
}

// Same grid and block as forward_held. A thread holds E elements of dy and of y.
template <typename T, int V, int E>
__global__ void __launch_bounds__(kMostThreads<E>)
    backward_held(T* dx, const T* dy, const T* y, Scores s, int threads) {
  GPTLITE_SHARED(float, slots);
  constexpr int kPacks = E / V;
  const RowThread at(threads);
  const int seen = static_cast<int>(seen_keys(s, at.row)), keys = at.row < s.rows ? static_cast<int>(s.keys) : 0;
  const int64_t start = at.row * s.keys;
  Pack<T, V> dy_packs[kPacks], y_packs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (at.lane + i * threads) * V;
    if (column < seen) {
      dy_packs[i] = load_pack<V>(dy + start + column);
      y_packs[i] = load_pack<V>(y + start + column);
    }
  }
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (at.lane + i * threads) * V;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (column + k < seen) dot = fmaf(dy_packs[i].at(k), y_packs[i].at(k), dot);
    }
  }
  dot = group_reduce<Sum>(dot, threads, slots);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (at.lane + i * threads) * V;
    if (column >= keys) continue;
    float v[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      v[k] = 0.0f;
      if (column + k < seen) v[k] = s.scale * y_packs[i].at(k) * (dy_packs[i].at(k) - dot);
    }
    store_floats<V>(dx + start + column, v);
  }
}

// Same grid and block as forward_long.
template <typename T, int V>
__global__ void __launch_bounds__(kLongBlock) backward_long(T* dx, const T* dy, const T* y, Scores s) {
  GPTLITE_SHARED(float, slots);
  const RowThread at(kLongBlock);
  const int64_t seen = seen_keys(s, at.row), start = at.row * s.keys;
  const int64_t first = static_cast<int64_t>(at.lane) * V, step = kLongBlock * V;
  float a[V], b[V], dot = 0.0f;
#pragma unroll 4
  for (int64_t column = first; column < seen; column += step) {
    load_floats<V>(a, dy + start + column);
    load_floats<V>(b, y + start + column);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (column + k < seen) dot = fmaf(a[k], b[k], dot);
    }
  }
  dot = group_reduce<Sum>(dot, kLongBlock, slots);
#pragma unroll 4
  for (int64_t column = first; column < s.keys; column += step) {
    if (column < seen) {
      load_floats<V>(a, dy + start + column);
      load_floats<V>(b, y + start + column);
    }
#pragma unroll
    for (int k = 0; k < V; ++k) a[k] = column + k < seen ? s.scale * b[k] * (a[k] - dot) : 0.0f;
    store_floats<V>(dx + start + column, a);
  }
}

constexpr int64_t kShared = 2 * kMaxWarps * sizeof(float);

// Returns whether the mask can be read in packs of `elements`, or there is no mask.
bool mask_in_packs(const Scores& s, int64_t elements) {
  if (s.mask_dtype == GPTLITE_NONE) return true;
  const int64_t size = s.mask_dtype == GPTLITE_BOOL ? 1 : s.mask_dtype == GPTLITE_FP32 ? 4 : 2;
  const int64_t bytes = elements * size < kPackBytes ? elements * size : kPackBytes;
  if (s.stride[3] != 1 || reinterpret_cast<uintptr_t>(s.mask) % bytes != 0) return false;
  return s.stride[0] * size % bytes == 0 && s.stride[1] * size % bytes == 0 && s.stride[2] * size % bytes == 0;
}

int forward(void* y, const void* x, const Scores& s, int dtype, void* stream) {
  if (s.keys == 0) return 0;
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const bool packs = rows_in_packs<T>(s.keys) && aligned(y, x) && mask_in_packs(s, kFullPack<T>);
    return by_layout<T>(packs, s.keys, [&](auto layout) {
      constexpr int V = decltype(layout)::V, E = decltype(layout)::E;
      const RowGrid grid = row_grid(s.rows, s.keys, E);
      T* out = static_cast<T*>(y);
      const T* in = static_cast<const T*>(x);
      if constexpr (E == 0) return launch(forward_long<T, V>, grid.blocks, grid.block, kShared, stream, out, in, s);
      else return launch(forward_held<T, V, E>, grid.blocks, grid.block, kShared, stream, out, in, s, grid.threads);
    });
  });
}

int backward(void* dx, const void* dy, const void* y, const Scores& s, int dtype, void* stream) {
  if (s.keys == 0) return 0;
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return by_layout<T>(rows_in_packs<T>(s.keys) && aligned(dx, dy, y), s.keys, [&](auto layout) {
      constexpr int V = decltype(layout)::V, E = decltype(layout)::E;
      const RowGrid grid = row_grid(s.rows, s.keys, E);
      T* out = static_cast<T*>(dx);
      const T *in = static_cast<const T*>(dy), *result = static_cast<const T*>(y);
      if constexpr (E == 0)
        return launch(backward_long<T, V>, grid.blocks, grid.block, kShared, stream, out, in, result, s);
      else
        return launch(backward_held<T, V, E>, grid.blocks, grid.block, kShared, stream, out, in, result, s,
                      grid.threads);
    });
  });
}

Scores scores(int64_t matrices, int64_t queries, int64_t keys, float scale, bool causal) {
  Scores s = {};
  s.rows = matrices * queries;
  s.queries = queries;
  s.keys = keys;
  s.heads = 1;
  s.mask_dtype = GPTLITE_NONE;
  s.causal = causal;
  s.scale = scale;
  return s;
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_masked_softmax_forward(void* y, const void* x, const void* mask, int mask_dtype,
                                        const int64_t* mask_strides, int64_t batch, int64_t heads, int64_t queries,
                                        int64_t keys, float scale, int dtype, void* stream) {
  gptlite::Scores s = gptlite::scores(batch * heads, queries, keys, scale, false);
  s.heads = heads;
  if (mask_dtype != GPTLITE_NONE) {
    s.mask = mask;
    s.mask_dtype = mask_dtype;
    for (int i = 0; i < 4; ++i) s.stride[i] = mask_strides[i];
    if (mask_dtype != GPTLITE_BOOL && !gptlite::is_float_dtype(mask_dtype))
      return static_cast<int>(cudaErrorInvalidValue);
  }
  return gptlite::forward(y, x, s, dtype, stream);
}

int gptlite_cuda_masked_softmax_backward(void* dx, const void* dy, const void* y, int64_t rows, int64_t keys,
                                         float scale, int dtype, void* stream) {
  return gptlite::backward(dx, dy, y, gptlite::scores(1, rows, keys, scale, false), dtype, stream);
}

int gptlite_cuda_causal_softmax_forward(void* y, const void* x, int64_t matrices, int64_t queries, int64_t keys,
                                        float scale, int dtype, void* stream) {
  return gptlite::forward(y, x, gptlite::scores(matrices, queries, keys, scale, true), dtype, stream);
}

int gptlite_cuda_causal_softmax_backward(void* dx, const void* dy, const void* y, int64_t matrices, int64_t queries,
                                         int64_t keys, float scale, int dtype, void* stream) {
  return gptlite::backward(dx, dy, y, gptlite::scores(matrices, queries, keys, scale, true), dtype, stream);
}
