// Cross entropy with z-loss (formula: GptliteLoss in gptlite_kernels.h). The gradient, of type G, overwrites the logits,
// of type T, or is written elsewhere in e5m2. A second version, in two kernels, is for logits whose columns are divided
// among tensor-parallel ranks.
//
// A block has one row. The block reads the row once, with an online softmax (running maximum and sum of exponentials,
// arXiv:1805.02867). It keeps the row in shared memory, computes the gradient from there and writes it once. The element
// of the target is written last, by one thread, so that the loop over the others needs no comparison.
//
// Traffic: 2 elements moved per logit, the minimum (in bf16 with an e5m2 gradient, 3 bytes), if the row fits into shared memory (227 KB on sm_90, 163 KB on
// sm_80: 50304 columns of 16 bits fit, and on sm_90 two such rows). Longer rows are read again, partly from the L2
// cache. Rows with an ignored target are not read. For divided columns, the first kernel moves 1 element per logit, the
// second 2. Rows need no alignment: elements before and after the aligned packs are processed one by one. But with an
// e5m2 gradient, rows of logits start at multiples of 16 bytes, and those of the gradient at multiples of 8.
#include "flat.cuh"
#include "reduce.cuh"

namespace gptlite {
namespace {

constexpr int kBlock = 512;
constexpr int kMostBlock = 1024;  // if a multiprocessor has room for only one row
constexpr int kMostWarps = kMostBlock / kWarp;
constexpr int kPacksAtOnce = 4;
constexpr int64_t kSlots = 2 * kMostWarps;  // floats of shared memory before the row

struct Logits {
  void* data;
  const int64_t* targets;
  int64_t row_stride;
  int64_t rows;
  int64_t columns;
  GptliteLoss loss;

  template <typename T>
  __device__ __forceinline__ T* row() const {
    return static_cast<T*>(data) + blockIdx.x * row_stride;
  }

  // Returns the row of the gradient.
  template <typename G>
  __device__ __forceinline__ G* gradient() const {
    if constexpr (std::is_same<G, E5m2>::value)
      return reinterpret_cast<G*>(loss.gradient) + blockIdx.x * loss.gradient_stride;
    else
      return row<G>();
  }

  // Returns the column of the row's target, which is out of range if another rank has it, or -1 if the target is
  // ignored.
  __device__ __forceinline__ int64_t target() const {
    const int64_t number = targets[blockIdx.x];
    return number == loss.ignore_index ? -1 : number - loss.first;
  }
};

// Calls body(N, first) until all packs of a thread are processed. N is kPacksAtOnce, and 1 for the remaining packs. The
// packs of a call are first + i * blockDim.x for i < N, so the body needs no bounds checks.
template <typename F>
__device__ __forceinline__ void for_packs(const Run& run, F body) {
  const uint32_t block = blockDim.x;
  uint32_t pack = threadIdx.x;
  for (; pack + (kPacksAtOnce - 1) * block < run.packs; pack += kPacksAtOnce * block)
    body(std::integral_constant<int, kPacksAtOnce>{}, pack);
#pragma unroll 1
  for (; pack < run.packs; pack += block) body(std::integral_constant<int, 1>{}, pack);
}

// Returns the thread that processes `column`, in for_packs or as a single element. No other thread accesses the column.
template <typename T>
__device__ __forceinline__ uint32_t owner(const Run& run, int64_t column) {
  if (column < run.head) return static_cast<uint32_t>(column);
  if (column >= run.count - run.tail) return static_cast<uint32_t>(run.head + column - (run.count - run.tail));
  return static_cast<uint32_t>((column - run.head) / kFullPack<T>) % blockDim.x;
}

// Computes exp(x - base) for many x. For 16-bit elements, by one fused multiply-add and a power of 2. The product
// log2(e) * base is rounded once for all x, so the error is that of a slightly different base. It overflows for a base
// beyond 2e38.
template <typename T>
struct Exponential {
  float base;

  __device__ __forceinline__ explicit Exponential(float from)
      : base(std::is_same<T, float>::value ? from : -kLog2E * from) {}

  __device__ __forceinline__ float of(float x) const {
    if constexpr (std::is_same<T, float>::value) return expf(x - base);
    return fast_exp2(fmaf(x, kLog2E, base));
  }
};

// Online softmax of a thread's part of a row: its maximum, and the sum of exp(x - maximum).
struct Online {
  float maximum = -INFINITY;
  float sum = 0.0f;

  template <typename T, int V, int N>
  __device__ __forceinline__ void add(const Pack<T, V> (&x)[N]) {
    float higher = maximum, exponentials = 0.0f;
#pragma unroll
    for (int k = 0; k < N * V; ++k) higher = fmaxf(higher, x[k / V].at(k % V));
    const Exponential<T> exponential(higher == -INFINITY ? 0.0f : higher);
#pragma unroll
    for (int k = 0; k < N * V; ++k) exponentials += exponential.of(x[k / V].at(k % V));
    sum = fmaf(sum, exponential.of(maximum), exponentials);
    maximum = higher;
  }

  // Combines the parts of all threads of the block, which all get the result. A maximum of -inf becomes 0, so that
  // exp(x - maximum) is not NaN.
  __device__ __forceinline__ void reduce(float* slots) {
    const int threads = static_cast<int>(blockDim.x);
    const float all = group_reduce<Max>(maximum, threads, slots), base = all == -INFINITY ? 0.0f : all;
    // A maximum of -inf means that the thread had no elements, or only -inf or NaN. Its sum is 0 or NaN with any base.
    sum = group_reduce<Sum>(sum * expf(maximum - base), threads, slots + kMostWarps);
    maximum = base;
  }
};

// Reads the row and, if Keep, stores its packs in `kept`. A thread later reads only the packs that it stored, so no
// barrier is needed.
template <bool Keep, typename T>
__device__ __forceinline__ Online read_row(const T* x, const Run& run, T* kept) {
  constexpr int V = kFullPack<T>;
  const uint32_t block = blockDim.x;
  const T* start = x + run.head;
  Online online;
  for_packs(run, [&](auto count, uint32_t first) {
    constexpr int N = decltype(count)::value;
    Pack<T, V> packs[N];
#pragma unroll
    for (int i = 0; i < N; ++i) packs[i] = load_pack<V>(start + int64_t{first + i * block} * V);
#pragma unroll
    for (int i = 0; Keep && i < N; ++i) keep_pack(kept + (first + i * block) * V, packs[i]);
    online.add(packs);
  });
  if (static_cast<int>(threadIdx.x) < run.head + run.tail) {
    const Pack<T, 1> single[1] = {load_pack<1>(x + run.single(threadIdx.x))};
    online.add(single);
  }
  return online;
}

// The gradient of a row: factor * exp(x - base), minus `hit` at the target. loss.scale is in both.
template <typename T>
struct Slope {
  Exponential<T> exponential;
  float factor;
  float hit;

  // log_sum is over the columns of all ranks. exp(x - base) * inverse is the softmax.
  __device__ __forceinline__ Slope(const GptliteLoss& loss, float base, float inverse, float log_sum)
      : exponential(base),
        factor((1.0f + 2.0f * loss.z_loss * log_sum) * inverse * loss.scale),
        hit(loss.scale) {}

  // The rounded product. nvcc may compile a mere a * b to one fused operation with the subtraction of `hit`.
  __device__ __forceinline__ float of(float x) const { return fmaf(factor, exponential.of(x), 0.0f); }

  template <typename G, int N>
  __device__ __forceinline__ Pack<G, N> of(const Pack<T, N>& x) const {
    float v[N];
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = of(x.at(k));
    return Pack<G, N>::of(v);
  }
};

// Writes the gradient of row x to `out`, which may be x, without the `hit` at the target. Reads the packs from `kept` if Keep, else from
// the row.
template <bool Keep, typename T, typename G>
__device__ __forceinline__ void write_gradient(const T* x, G* out, const Run& run, const T* kept,
                                               const Slope<T>& slope) {
  constexpr int V = kFullPack<T>;
  const uint32_t block = blockDim.x;
  const T* start = x + run.head;
  G* to = out + run.head;
  for_packs(run, [&](auto count, uint32_t first) {
    constexpr int N = decltype(count)::value;
    Pack<T, V> packs[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t pack = first + i * block;
      packs[i] = Keep ? load_pack<V>(kept + pack * V) : load_pack<V>(start + int64_t{pack} * V);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) store_pack<V>(to + int64_t{first + i * block} * V, slope.template of<G>(packs[i]));
  });
  if (static_cast<int>(threadIdx.x) >= run.head + run.tail) return;
  const int64_t column = run.single(threadIdx.x);
  store_pack<1>(out + column, slope.template of<G>(load_pack<1>(x + column)));
}

// V: elements in a pack of the logits.
template <int V, typename G>
__device__ __forceinline__ void write_zeros(G* out, const Run& run) {
  for (uint32_t i = threadIdx.x; i < run.packs; i += blockDim.x)
    store_pack<V>(out + run.head + int64_t{i} * V, Pack<G, V>{});
  if (static_cast<int>(threadIdx.x) < run.head + run.tail) out[run.single(threadIdx.x)] = G{};
}

// Grid: one block per row. Block: up to 512 threads, or 1024 if a multiprocessor has shared memory for only one row.
// Keep: the gradient is wanted, and the row fits into shared memory.
template <typename T, bool Keep, typename G>
__global__ void __launch_bounds__(kMostBlock) whole_kernel(float* losses, Logits logits, bool want_gradient) {
  GPTLITE_SHARED(float, shared);
  const T* x = logits.row<T>();
  G* out = logits.gradient<G>();
  const Run run = Run::of(x, logits.columns);
  if (logits.targets[blockIdx.x] == logits.loss.ignore_index) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
    if (want_gradient) write_zeros<kFullPack<T>>(out, run);
    return;
  }
  const GptliteLoss& loss = logits.loss;
  const int64_t target = logits.target();
  const bool here = target >= 0 && target < logits.columns;
  // Only the owner of the target's column accesses the target. It reads the logit here, before it overwrites the row.
  const bool mine = threadIdx.x == (here ? owner<T>(run, target) : 0);
  const float hit = mine && here ? to_float(x[target]) : NAN;
  T* kept = reinterpret_cast<T*>(shared + kSlots);
  auto row = read_row<Keep>(x, run, kept);
  row.reduce(shared);
  const float log_sum = row.maximum + logf(row.sum);
  if (mine) losses[blockIdx.x] = log_sum - hit + loss.z_loss * log_sum * log_sum;
  if (!want_gradient) return;
  const Slope<T> slope(loss, row.maximum, 1.0f / row.sum, log_sum);
  write_gradient<Keep>(x, out, run, kept, slope);
  if (mine && here) out[target] = from_float<G>(slope.of(hit) - slope.hit);
}

// Grid: one block per row, of up to 512 threads. Writes the row's log sum exp over the columns of this rank, and its
// target logit (0 if another rank has it).
template <typename T>
__global__ void __launch_bounds__(kBlock) stats_kernel(float* stats, Logits logits) {
  GPTLITE_SHARED(float, shared);
  const T* x = logits.row<T>();
  auto row = read_row<false, T>(x, Run::of(x, logits.columns), nullptr);
  row.reduce(shared);
  if (threadIdx.x != 0) return;
  const int64_t target = logits.target();
  float* out = stats + static_cast<int64_t>(blockIdx.x) * 2;
  out[0] = row.maximum + logf(row.sum);
  out[1] = target >= 0 && target < logits.columns ? to_float(x[target]) : 0.0f;
}

// Same grid and block as stats_kernel. Writes the row's gradient. With log_sum as the base, exp(x - base) is
// already the softmax.
template <typename T, typename G>
__global__ void __launch_bounds__(kBlock) gradient_kernel(Logits logits, const float* log_sum) {
  const T* x = logits.row<T>();
  G* out = logits.gradient<G>();
  const Run run = Run::of(x, logits.columns);
  if (logits.targets[blockIdx.x] == logits.loss.ignore_index) return write_zeros<kFullPack<T>>(out, run);
  const int64_t target = logits.target();
  const bool mine = target >= 0 && target < logits.columns && threadIdx.x == owner<T>(run, target);
  const float log = log_sum[blockIdx.x], hit = mine ? to_float(x[target]) : 0.0f;
  const Slope<T> slope(logits.loss, log, 1.0f, log);
  write_gradient<false, T>(x, out, run, nullptr, slope);
  if (mine) out[target] = from_float<G>(slope.of(hit) - slope.hit);
}

// Returns the number of threads for a row: a multiple of a warp, so that a thread has about four packs, and at most
// `most`.
int block_for(int64_t columns, int elements, int64_t most) {
  const int64_t threads = divide_up(divide_up(columns, kPacksAtOnce * elements), kWarp) * kWarp;
  return static_cast<int>(threads < kWarp ? kWarp : threads < most ? threads : most);
}

template <typename T, typename G>
int whole(float* losses, const Logits& logits, bool want_gradient, void* stream) {
  const int64_t slots = kSlots * sizeof(float), kept = slots + logits.columns * static_cast<int64_t>(sizeof(T));
  const int64_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, kPlainShared);
  const bool keep = want_gradient && kept <= limit && allow_shared(whole_kernel<T, true, G>, kept);
  const auto kernel = keep ? whole_kernel<T, true, G> : whole_kernel<T, false, G>;
  // If a multiprocessor has shared memory for only one block, this block must saturate the memory alone.
  const int block = block_for(logits.columns, kFullPack<T>, keep && 2 * kept > limit ? kMostBlock : kBlock);
  return launch(kernel, logits.rows, block, keep ? kept : slots, stream, losses, logits, want_gradient);
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_cross_entropy(float* losses, void* logits, int64_t row_stride, const int64_t* targets, int64_t rows,
                               int64_t columns, const GptliteLoss* loss, int want_gradient, int dtype, void* stream) {
  using namespace gptlite;
  const Logits all = {logits, targets, row_stride, rows, columns, *loss};
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (std::is_same<T, Bf16>::value) {
      if (loss->gradient != nullptr) return whole<T, E5m2>(losses, all, want_gradient != 0, stream);
    }
    return whole<T, T>(losses, all, want_gradient != 0, stream);
  });
}

int gptlite_cuda_cross_entropy_stats(float* stats, const void* logits, int64_t row_stride, const int64_t* targets,
                                     int64_t rows, int64_t columns, const GptliteLoss* loss, int dtype, void* stream) {
  using namespace gptlite;
  const Logits all = {const_cast<void*>(logits), targets, row_stride, rows, columns, *loss};
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const int block = block_for(columns, kFullPack<T>, kBlock);
    return launch(stats_kernel<T>, rows, block, kSlots * sizeof(float), stream, stats, all);
  });
}

int gptlite_cuda_cross_entropy_gradient(void* logits, int64_t row_stride, const int64_t* targets, const float* log_sum,
                                        int64_t rows, int64_t columns, const GptliteLoss* loss, int dtype,
                                        void* stream) {
  using namespace gptlite;
  if (columns == 0) return 0;
  const Logits all = {logits, targets, row_stride, rows, columns, *loss};
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const int block = block_for(columns, kFullPack<T>, kBlock);
    if constexpr (std::is_same<T, Bf16>::value) {
      if (loss->gradient != nullptr) return launch(gradient_kernel<T, E5m2>, rows, block, 0, stream, all, log_sum);
    }
    return launch(gradient_kernel<T, T>, rows, block, 0, stream, all, log_sum);
  });
}
