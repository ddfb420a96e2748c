// Cross entropy of logits, which become their own gradient; and the two halves of it where ranks share the columns.
//
// A block has a row. It reads it once, with a running maximum, a sum of exponentials and, where labels are smoothed, a
// sum, and keeps it in shared memory, where the gradient is then computed from and written once, the target's element
// last and alone, so that the others need no question: 2 elements moved for each, the least there is, for
// rows that fit (227 KB on sm_90, 163 on sm_80: all of 50304 columns in 16 bits, twice on sm_90). Longer rows are read
// again, from the L2 cache as far as it goes. Nothing is read where the target is to be ignored. The first half for
// shared columns moves 1 element, the second 2. Rows may start anywhere: what isn't aligned to a pack, at both ends,
// goes singly.
#include "flat.cuh"
#include "reduce.cuh"

namespace gptlite {
namespace {

constexpr int kBlock = 512;
constexpr int kMostBlock = 1024;  // where a processor has room for one row alone
constexpr int kMostWarps = kMostBlock / kWarp;
constexpr int kPacksAtOnce = 4;
constexpr int64_t kSlots = 3 * kMostWarps;  // floats of shared memory before the row

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

  // The column of the row's target, here or not; -1 where it is to be ignored.
  __device__ __forceinline__ int64_t target() const {
    const int64_t number = targets[blockIdx.x];
    return number == loss.ignore_index ? -1 : number - loss.first;
  }
};

// Calls body(packs of kPacksAtOnce, pack's number) and, for what is left of the thread's share, body(one pack, number):
// no question in between whether a pack is there.
template <typename F>
__device__ __forceinline__ void for_packs(const Run& run, F body) {
  const uint32_t block = blockDim.x;
  uint32_t pack = threadIdx.x;
  for (; pack + (kPacksAtOnce - 1) * block < run.packs; pack += kPacksAtOnce * block)
    body(std::integral_constant<int, kPacksAtOnce>{}, pack);
#pragma unroll 1
  for (; pack < run.packs; pack += block) body(std::integral_constant<int, 1>{}, pack);
}

// The thread that has the column in for_packs, or among the single ones: no other reads or writes it.
template <typename T>
__device__ __forceinline__ uint32_t owner(const Run& run, int64_t column) {
  if (column < run.head) return static_cast<uint32_t>(column);
  if (column >= run.count - run.tail) return static_cast<uint32_t>(run.head + column - (run.count - run.tail));
  return static_cast<uint32_t>((column - run.head) / kFullPack<T>) % blockDim.x;
}

// exp(x - base) of many x. In 16 bits a multiplication and addition in one, and a power of 2: the rounding of the base's
// product is the same for all x, as if it were another base. A base beyond 2e38 is out of its range.
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

// A thread's part of a row: sum of exp(x - maximum), and of x where that is wanted.
template <bool Total>
struct Online {
  float maximum = -INFINITY;
  float sum = 0.0f;
  float total = 0.0f;

  template <typename T, int V, int N>
  __device__ __forceinline__ void add(const Pack<T, V> (&x)[N]) {
    float higher = maximum, exponentials = 0.0f;
#pragma unroll
    for (int k = 0; k < N * V; ++k) higher = fmaxf(higher, x[k / V].at(k % V));
    const Exponential<T> exponential(higher == -INFINITY ? 0.0f : higher);
#pragma unroll
    for (int k = 0; k < N * V; ++k) {
      exponentials += exponential.of(x[k / V].at(k % V));
      if (Total) total += x[k / V].at(k % V);
    }
    sum = fmaf(sum, exponential.of(maximum), exponentials);
    maximum = higher;
  }

  // Over the block, all threads of which have the result; the maximum is finite but for rows with infinities alone or
  // NaN.
  __device__ __forceinline__ void reduce(float* slots) {
    const int threads = static_cast<int>(blockDim.x);
    const float all = group_reduce<Max>(maximum, threads, slots), base = all == -INFINITY ? 0.0f : all;
    // A thread that saw nothing, or -inf alone, has a sum of 0; one that saw NaN, NaN: under any maximum.
    float sums[2] = {sum * expf(maximum - base), total};
    group_reduce<Sum>(sums, threads, slots + kMostWarps);
    maximum = base;
    sum = sums[0];
    total = sums[1];
  }
};

// Reads the row; keeps its packs in `kept`. Every thread keeps what it will itself need.
template <bool Total, bool Keep, typename T>
__device__ __forceinline__ Online<Total> read_row(const T* x, const Run& run, T* kept) {
  constexpr int V = kFullPack<T>;
  const uint32_t block = blockDim.x;
  const T* start = x + run.head;
  Online<Total> online;
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

// What turns a row into its gradient: factor * exp(x - base) - each, and `hit` less at the target.
template <typename T>
struct Slope {
  Exponential<T> exponential;
  float factor;
  float each;
  float hit;

  // `log_sum`: of all columns. exp(x - base) times `inverse` is a probability.
  __device__ __forceinline__ Slope(const GptliteLoss& loss, float base, float inverse, float log_sum)
      : exponential(base),
        factor((1.0f + 2.0f * loss.z_loss * log_sum) * inverse * loss.scale),
        each(loss.label_smoothing / static_cast<float>(loss.vocab_size) * loss.scale),
        hit((1.0f - loss.label_smoothing) * loss.scale) {}

  __device__ __forceinline__ float of(float x) const { return fmaf(factor, exponential.of(x), -each); }

  template <int N>
  __device__ __forceinline__ Pack<T, N> of(const Pack<T, N>& x) const {
    float v[N];
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = of(x.at(k));
    return Pack<T, N>::of(v);
  }
};

// Writes the gradient in the row's place but for `hit`, from the row or from what was kept of it.
template <bool Keep, typename T>
__device__ __forceinline__ void write_gradient(T* x, const Run& run, const T* kept, const Slope<T>& slope) {
  constexpr int V = kFullPack<T>;
  const uint32_t block = blockDim.x;
  T* start = x + run.head;
  for_packs(run, [&](auto count, uint32_t first) {
    constexpr int N = decltype(count)::value;
    Pack<T, V> packs[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t pack = first + i * block;
      packs[i] = Keep ? load_pack<V>(kept + pack * V) : load_pack<V>(start + int64_t{pack} * V);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) store_pack<V>(start + int64_t{first + i * block} * V, slope.of(packs[i]));
  });
  if (static_cast<int>(threadIdx.x) >= run.head + run.tail) return;
  const int64_t column = run.single(threadIdx.x);
  store_pack<1>(x + column, slope.of(load_pack<1>(x + column)));
}

template <typename T>
__device__ __forceinline__ void write_zeros(T* x, const Run& run) {
  constexpr int V = kFullPack<T>;
  for (uint32_t i = threadIdx.x; i < run.packs; i += blockDim.x)
    store_pack<V>(x + run.head + int64_t{i} * V, Pack<T, V>{});
  if (static_cast<int>(threadIdx.x) < run.head + run.tail) x[run.single(threadIdx.x)] = T{};
}

// Total: with label smoothing. Keep: the row fits into shared memory, and its gradient is wanted.
template <typename T, bool Total, bool Keep>
__global__ void __launch_bounds__(kMostBlock) whole_kernel(float* losses, Logits logits, bool want_gradient) {
  GPTLITE_SHARED(float, shared);
  T* x = logits.row<T>();
  const Run run = Run::of(x, logits.columns);
  if (logits.targets[blockIdx.x] == logits.loss.ignore_index) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
    if (want_gradient) write_zeros(x, run);
    return;
  }
  const GptliteLoss& loss = logits.loss;
  const int64_t target = logits.target();
  const bool here = target >= 0 && target < logits.columns;
  // One thread sees to the target: it reads it before it writes there, and no other does either.
  const bool mine = threadIdx.x == (here ? owner<T>(run, target) : 0);
  const float hit = mine && here ? to_float(x[target]) : NAN;
  T* kept = reinterpret_cast<T*>(shared + kSlots);
  auto row = read_row<Total, Keep>(x, run, kept);
  row.reduce(shared);
  const float log_sum = row.maximum + logf(row.sum);
  if (mine) {
    float value = log_sum - (1.0f - loss.label_smoothing) * hit + loss.z_loss * log_sum * log_sum;
    if (Total) value -= loss.label_smoothing / static_cast<float>(loss.vocab_size) * row.total;
    losses[blockIdx.x] = value;
  }
  if (!want_gradient) return;
  const Slope<T> slope(loss, row.maximum, 1.0f / row.sum, log_sum);
  write_gradient<Keep>(x, run, kept, slope);
  if (mine && here) x[target] = from_float<T>(slope.of(hit) - slope.hit);
}

template <typename T>
__global__ void __launch_bounds__(kBlock) stats_kernel(float* stats, Logits logits) {
  GPTLITE_SHARED(float, shared);
  const T* x = logits.row<T>();
  auto row = read_row<true, false, T>(x, Run::of(x, logits.columns), nullptr);
  row.reduce(shared);
  if (threadIdx.x != 0) return;
  const int64_t target = logits.target();
  float* out = stats + static_cast<int64_t>(blockIdx.x) * 3;
  out[0] = row.maximum + logf(row.sum);
  out[1] = target >= 0 && target < logits.columns ? to_float(x[target]) : 0.0f;
  out[2] = row.total;
}

template <typename T>
__global__ void __launch_bounds__(kBlock) gradient_kernel(Logits logits, const float* log_sum) {
  T* x = logits.row<T>();
  const Run run = Run::of(x, logits.columns);
  if (logits.targets[blockIdx.x] == logits.loss.ignore_index) return write_zeros(x, run);
  const int64_t target = logits.target();
  const bool mine = target >= 0 && target < logits.columns && threadIdx.x == owner<T>(run, target);
  const float log = log_sum[blockIdx.x], hit = mine ? to_float(x[target]) : 0.0f;
  const Slope<T> slope(logits.loss, log, 1.0f, log);
  write_gradient<false, T>(x, run, nullptr, slope);
  if (mine) x[target] = from_float<T>(slope.of(hit) - slope.hit);
}

// Threads for a row: as many as have four packs each, at most `most`.
int block_for(int64_t columns, int elements, int64_t most) {
  const int64_t threads = divide_up(divide_up(columns, kPacksAtOnce * elements), kWarp) * kWarp;
  return static_cast<int>(threads < kWarp ? kWarp : threads < most ? threads : most);
}

template <typename T>
int whole(float* losses, const Logits& logits, bool want_gradient, void* stream) {
  const int64_t slots = kSlots * sizeof(float), kept = slots + logits.columns * static_cast<int64_t>(sizeof(T));
  const int64_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, kPlainShared);
  const bool total = logits.loss.label_smoothing != 0.0f;
  const auto keeps = total ? whole_kernel<T, true, true> : whole_kernel<T, false, true>;
  const bool keep = want_gradient && kept <= limit && allow_shared(keeps, kept);
  const auto kernel = keep ? keeps : total ? whole_kernel<T, true, false> : whole_kernel<T, false, false>;
  // One block a processor must keep the memory busy alone.
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
    return whole<decltype(element)>(losses, all, want_gradient != 0, stream);
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
    return launch(gradient_kernel<T>, rows, block, 0, stream, all, log_sum);
  });
}
