// RMS norm (QK norm) and rotary position embedding (RoPE, arXiv:2104.09864) of the query and key heads of a packed qkv
// tensor, forward and backward. The value heads are copied. Columns i and half + i of a head, (a, b), become
// (a cos - b sin, b cos + a sin).
//
// A head (a "row") takes a warp or a part of a warp. A thread has a pack of the first half of the head and the same
// pack of the second half, so the rotation needs no other thread. Adjacent groups of threads have adjacent heads, which
// are mostly of the same token and share its cosines and sines.
//
// Traffic: the forward pass reads and writes each head once, 2 elements moved per element. The backward pass with a
// norm reads dout and qkv and writes dqkv, 3 elements. It sums the gradients of the gains in registers, in at most 256
// parts, which column_sums.cu adds. Without a norm, the backward pass is a rotation by the negative angle, which the
// forward kernel computes, again with 2 elements.
#include "columns.cuh"
#include "row.cuh"

namespace gptlite {
namespace {

constexpr int kBlock = 256;
constexpr int kSingly = 8;  // elements of a half per thread, if heads are not aligned to packs

struct Rope {
  void* out;          // backward: dqkv
  const void* in;     // backward: dout
  const void* saved;  // backward: qkv
  float* parts;       // parts of dq_gain, then of dk_gain, or NULL
  const float* cos;   // NULL: no rotation
  const float* sin;
  const void* gain[2];  // of the q and k norms, or NULL
  int64_t rows;         // number of heads of all tokens
  int64_t angles;       // number of rows of cos and sin
  int heads;            // per token, including k and v
  int group;            // heads per group: its queries, k and v
  int width;
  int half;  // columns i and half + i form a pair
  int gain_dtype;
  float eps;  // negative: no norm
  float inverse_width;
  float sign;  // factor of sin
};

enum Kind { kQuery, kKey, kValue };

// Position of a thread: its head and its columns, column(p) to column(p) + V - 1 for p < P, and those plus `half`.
template <int V, int P>
struct HeadThread {
  int64_t row;
  int64_t token;
  Kind kind;
  int lane;
  int threads;

  __device__ __forceinline__ HeadThread(const Rope& r, int64_t row_, int threads_)
      : row(row_), lane(static_cast<int>(threadIdx.x) % threads_), threads(threads_) {
    int64_t head;
    divide(row, r.heads, &token, &head);
    const int last = r.group - 1 - static_cast<int>(static_cast<uint32_t>(head) % static_cast<uint32_t>(r.group));
    kind = last == 0 ? kValue : last == 1 ? kKey : kQuery;
  }

  __device__ __forceinline__ int column(int p) const { return (lane + p * threads) * V; }
};

// A thread's packs of both halves of a head, with zeros past the end of the head.
template <typename T, int V, int P>
struct HeadPacks {
  Pack<T, V> first[P] = {};
  Pack<T, V> second[P] = {};

  __device__ __forceinline__ void load(const Rope& r, const void* from, const HeadThread<V, P>& at) {
    const T* head = static_cast<const T*>(from) + at.row * r.width;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int column = at.column(p), other = column + r.half;
      if (column < r.half) first[p] = load_pack<V>(head + column);
      if (column < r.half && other < r.width) second[p] = load_pack<V>(head + other);
    }
  }

  __device__ __forceinline__ void store(const Rope& r, const HeadThread<V, P>& at) const {
    T* head = static_cast<T*>(r.out) + at.row * r.width;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int column = at.column(p), other = column + r.half;
      if (column < r.half) store_pack<V>(head + column, first[p]);
      if (column < r.half && other < r.width) store_pack<V>(head + other, second[p]);
    }
  }
};

// Rotates V pairs of columns from `column` on, by the angles of `token`.
template <int V>
__device__ __forceinline__ void rotate(const Rope& r, int64_t token, int column, float* first, float* second) {
  if (r.cos == nullptr) return;
  int64_t ignored, angle;
  divide(token, r.angles, &ignored, &angle);
  float cos[V], sin[V];
  load_floats<V>(cos, r.cos + angle * r.half + column);
  load_floats<V>(sin, r.sin + angle * r.half + column);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const float turned = fmaf(first[k], cos[k], -r.sign * sin[k] * second[k]);
    second[k] = fmaf(second[k], cos[k], r.sign * sin[k] * first[k]);
    first[k] = turned;
  }
}

// Multiplies V columns from `column` on by the gain of the query or key norm, if there is one.
template <int V>
__device__ __forceinline__ void scale(const Rope& r, Kind kind, int column, float* v) {
  const void* gain = kind == kKey ? r.gain[1] : r.gain[0];
  if (gain == nullptr || column >= r.width) return;
  float loaded[V];
  load_floats<V>(loaded, gain, r.gain_dtype, column);
#pragma unroll
  for (int k = 0; k < V; ++k) v[k] *= loaded[k];
}

// Block: 256 threads, with one head per group of `threads`. Grid: as many blocks as cover all heads.
template <typename T, int V, int P>
__global__ void __launch_bounds__(kBlock) forward_kernel(Rope r, int threads) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kBlock / threads) + threadIdx.x / threads;
  const HeadThread<V, P> at(r, row, threads);
  HeadPacks<T, V, P> x;
  if (row < r.rows) x.load(r, r.in, at);
  float rstd = 1.0f;
  if (r.eps >= 0.0f) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < P * V; ++i) {
      const float first = x.first[i / V].at(i % V), second = x.second[i / V].at(i % V);
      squares = fmaf(first, first, fmaf(second, second, squares));
    }
    squares = group_reduce<Sum>(squares, threads, nullptr);
    rstd = rsqrtf(fmaf(squares, r.inverse_width, r.eps));
  }
  if (row >= r.rows) return;
  if (at.kind == kValue) return x.store(r, at);
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int column = at.column(p);
    if (column >= r.half) continue;
    float first[V], second[V];
#pragma unroll
    for (int k = 0; k < V; ++k) first[k] = x.first[p].at(k) * rstd, second[k] = x.second[p].at(k) * rstd;
    scale<V>(r, at.kind, column, first);
    scale<V>(r, at.kind, column + r.half, second);
    rotate<V>(r, at.token, column, first, second);
    x.first[p] = Pack<T, V>::of(first), x.second[p] = Pack<T, V>::of(second);
  }
  x.store(r, at);
}

// Adds the sums of the block's groups in a fixed order, and writes them as the block's parts. `shared` has 2 * width
// floats per warp.
template <int V, int P>
__device__ __forceinline__ void store_gain_parts(const Rope& r, const HeadThread<V, P>& at, float (&sum)[4][P * V],
                                                 float* shared) {
  for (int offset = at.threads; offset < kWarp; offset *= 2) {
#pragma unroll
    for (int i = 0; i < 4 * P * V; ++i)
      sum[i / (P * V)][i % (P * V)] += __shfl_xor_sync(kAllLanes, sum[i / (P * V)][i % (P * V)], offset);
  }
  float* mine = shared + threadIdx.x / kWarp * 2 * r.width;
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int column = at.column(p);
    if (static_cast<int>(threadIdx.x) % kWarp >= at.threads || column >= r.half) continue;
#pragma unroll
    for (int k = 0; k < 4 * V; ++k) {  // first and second half of q, then of k
      const int which = k / V, here = column + k % V + (which % 2) * r.half;
      if (here < r.width) mine[which / 2 * r.width + here] = sum[which][p * V + k % V];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * r.width; i += kBlock) {
    float total = 0.0f;
    for (int warp = 0; warp < kBlock / kWarp; ++warp) total += shared[warp * 2 * r.width + i];
    const int which = i < r.width ? 0 : 1;
    r.parts[(static_cast<int64_t>(which) * gridDim.x + blockIdx.x) * r.width + i - which * r.width] = total;
  }
}

// Block: as in the forward kernel. Grid: up to 256 blocks if there are gains, else 32 per multiprocessor; each block
// loops over heads. Recomputes rstd from qkv, so the forward pass stores nothing.
template <typename T, int V, int P>
__global__ void __launch_bounds__(kBlock, V > 1 ? 2 : 1) backward_kernel(Rope r, int threads) {
  GPTLITE_SHARED(float, shared);
  const int group = static_cast<int>(threadIdx.x) / threads, groups = kBlock / threads;
  float sum[4][P * V] = {};
  // All threads of a warp run the same number of iterations, because they reduce together. A row past the last is
  // zeros.
  for (int64_t start = static_cast<int64_t>(blockIdx.x) * groups; start < r.rows; start += gridDim.x * groups) {
    const int64_t row = start + group;
    const HeadThread<V, P> at(r, row, threads);
    HeadPacks<T, V, P> x, dy;
    if (row < r.rows) x.load(r, r.saved, at), dy.load(r, r.in, at);
    float c[2] = {};  // sums of x^2, and of x times the gradient of the normalized row
    float first[P][V], second[P][V];
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int column = at.column(p);
      float scaled[2][V] = {};
#pragma unroll
      for (int k = 0; k < V; ++k) first[p][k] = dy.first[p].at(k), second[p][k] = dy.second[p].at(k);
      if (row >= r.rows || column >= r.half || at.kind == kValue) continue;
      rotate<V>(r, at.token, column, first[p], second[p]);
#pragma unroll
      for (int k = 0; k < V; ++k) scaled[0][k] = first[p][k], scaled[1][k] = second[p][k];
      scale<V>(r, at.kind, column, scaled[0]);
      scale<V>(r, at.kind, column + r.half, scaled[1]);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const float a = x.first[p].at(k), b = x.second[p].at(k);
        c[0] = fmaf(a, a, fmaf(b, b, c[0]));
        c[1] = fmaf(a, scaled[0][k], fmaf(b, scaled[1][k], c[1]));
      }
    }
    group_reduce<Sum>(c, threads, nullptr);
    if (row >= r.rows) continue;
    if (at.kind == kValue) {
      dy.store(r, at);
      continue;
    }
    const float rstd = rsqrtf(fmaf(c[0], r.inverse_width, r.eps)), slope = rstd * rstd * c[1] * r.inverse_width;
    const bool is_key = at.kind == kKey;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int column = at.column(p);
      if (column >= r.half) continue;
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const float a = x.first[p].at(k) * rstd * first[p][k], b = x.second[p].at(k) * rstd * second[p][k];
        sum[0][p * V + k] += is_key ? 0.0f : a;
        sum[1][p * V + k] += is_key ? 0.0f : b;
        sum[2][p * V + k] += is_key ? a : 0.0f;
        sum[3][p * V + k] += is_key ? b : 0.0f;
      }
      scale<V>(r, at.kind, column, first[p]);
      scale<V>(r, at.kind, column + r.half, second[p]);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        first[p][k] = (first[p][k] - x.first[p].at(k) * slope) * rstd;
        second[p][k] = (second[p][k] - x.second[p].at(k) * slope) * rstd;
      }
      dy.first[p] = Pack<T, V>::of(first[p]), dy.second[p] = Pack<T, V>::of(second[p]);
    }
    dy.store(r, at);
  }
  if (r.parts != nullptr) store_gain_parts<V, P>(r, HeadThread<V, P>(r, 0, threads), sum, shared);
}

template <typename T, int V, int P>
int forward(const Rope& r, void* stream) {
  const int threads = row_threads(r.half, V * P);
  return launch(forward_kernel<T, V, P>, divide_up(r.rows, kBlock / threads), kBlock, 0, stream, r, threads);
}

template <typename T, int V, int P>
int backward(Rope r, void* dq_gain, void* dk_gain, void* stream) {
  const int threads = row_threads(r.half, V * P);
  const bool sums = dq_gain != nullptr || dk_gain != nullptr;
  if (!sums) r.parts = nullptr;
  const int64_t needed = divide_up(r.rows, kBlock / threads), most = sums ? kMaxParts : 32 * processors();
  const int64_t blocks = needed < most ? needed : most;
  const int64_t shared = sums ? kBlock / kWarp * 2 * r.width * static_cast<int64_t>(sizeof(float)) : 0;
  const int error = launch(backward_kernel<T, V, P>, blocks, kBlock, shared, stream, r, threads);
  if (error != 0 || !sums) return error;
  return add_parts(ColumnSums{{dq_gain, dk_gain, nullptr}, r.parts, blocks, r.width, r.gain_dtype}, stream);
}

// Calls f with a value of the element type and whether heads are read in packs. Returns an error if heads are too wide.
template <typename F>
int by_head(const Rope& r, int dtype, F f) {
  if (r.width > 2 * kSingly * kWarp || !is_float_dtype(r.gain_dtype)) return static_cast<int>(cudaErrorInvalidValue);
  if (r.width == 0) return 0;
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int V = kFullPack<T>;
    const bool packs = r.width % (2 * V) == 0 && r.half <= V * kWarp &&
                       aligned(r.out, r.in, r.saved, r.cos, r.sin, r.gain[0], r.gain[1]);
    return f(element, packs);
  });
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_rope_forward(void* out, const void* qkv, const float* cos, const float* sin, const void* q_gain,
                              const void* k_gain, int64_t tokens, int64_t angles, int64_t groups, int64_t queries,
                              int64_t width, float eps, int dtype, int gain_dtype, void* stream) {
  using namespace gptlite;
  const int group = static_cast<int>(queries) + 2, heads = static_cast<int>(groups) * group;
  const Rope r = {out, qkv, nullptr, nullptr, cos, sin, {q_gain, k_gain}, tokens * heads, angles, heads, group,
                  static_cast<int>(width), static_cast<int>((width + 1) / 2), gain_dtype, eps,
                  1.0f / static_cast<float>(width), 1.0f};
  return by_head(r, dtype, [&](auto element, bool packs) {
    using T = decltype(element);
    return packs ? forward<T, kFullPack<T>, 1>(r, stream) : forward<T, 1, kSingly>(r, stream);
  });
}

int gptlite_cuda_rope_backward(void* dqkv, void* dq_gain, void* dk_gain, float* workspace, const void* dout,
                               const void* qkv, const float* cos, const float* sin, const void* q_gain,
                               const void* k_gain, int64_t tokens, int64_t angles, int64_t groups, int64_t queries,
                               int64_t width, float eps, int dtype, int gain_dtype, void* stream) {
  using namespace gptlite;
  const int group = static_cast<int>(queries) + 2, heads = static_cast<int>(groups) * group;
  const Rope r = {dqkv, dout, qkv, workspace, cos, sin, {q_gain, k_gain}, tokens * heads, angles, heads, group,
                  static_cast<int>(width), static_cast<int>((width + 1) / 2), gain_dtype, eps,
                  1.0f / static_cast<float>(width), -1.0f};
  return by_head(r, dtype, [&](auto element, bool packs) {
    using T = decltype(element);
    if (eps < 0.0f) return packs ? forward<T, kFullPack<T>, 1>(r, stream) : forward<T, 1, kSingly>(r, stream);
    return packs ? backward<T, kFullPack<T>, 1>(r, dq_gain, dk_gain, stream)
                 : backward<T, 1, kSingly>(r, dq_gain, dk_gain, stream);
  });
}
