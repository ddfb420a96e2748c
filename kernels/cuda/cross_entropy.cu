// Cross entropy of logits, which become their own gradient; and the two halves of it where ranks share the columns.
//
// A block has a row. It reads it once, with a running maximum, a sum of exponentials and a sum, and keeps it in shared
// memory, where the gradient is then computed from and written once: 2 elements moved for each, the least there is, for
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

// A thread's part of a row: sum of exp(x - maximum), and of x.
struct Online {
  float maximum = -INFINITY;
  float sum = 0.0f;
  float total = 0.0f;

  template <typename T, int N>
  __device__ __forceinline__ void add(const Pack<T, N>& x) {
    float higher = maximum, exponentials = 0.0f;
#pragma unroll
    for (int k = 0; k < N; ++k) higher = fmaxf(higher, to_float(x.value[k]));
    const float base = higher == -INFINITY ? 0.0f : higher;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      exponentials += exponential<T>(to_float(x.value[k]) - base);
      total += to_float(x.value[k]);
    }
    sum = fmaf(sum, exponential<T>(maximum - base), exponentials);
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

// Reads the row; keeps its packs in `kept` where that isn't NULL. Every thread keeps what it will itself need.
template <typename T>
__device__ __forceinline__ Online read_row(const T* x, const Run& run, Pack<T, kFullPack<T>>* kept) {
  constexpr int V = kFullPack<T>;
  const uint32_t block = blockDim.x;
  Online online;
  for (uint32_t first = threadIdx.x; first < run.packs; first += kPacksAtOnce * block) {
    Pack<T, V> packs[kPacksAtOnce];
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      if (first + i * block < run.packs) packs[i] = load_pack<V>(x + run.head + int64_t{first + i * block} * V);
    }
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      if (first + i * block >= run.packs) break;
      if (kept != nullptr) kept[first + i * block] = packs[i];
      online.add(packs[i]);
    }
  }
  if (static_cast<int>(threadIdx.x) < run.head + run.tail) online.add(load_pack<1>(x + run.single(threadIdx.x)));
  return online;
}

// What turns a row into its gradient: factor * exp(x - base) - each, and `hit` less at the target.
struct Slope {
  float base;
  float factor;
  float each;
  float hit;
  int64_t target;

  template <typename T, int N>
  __device__ __forceinline__ void apply(Pack<T, N>& x, int64_t column) const {
    float v[N];
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = fmaf(factor, exponential<T>(to_float(x.value[k]) - base), -each);
    if (target >= column && target < column + N) {
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] -= column + k == target ? hit : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) x.value[k] = from_float<T>(v[k]);
  }
};

// `log_sum`: of all columns. exp(x - base) times `inverse` is a probability.
__device__ __forceinline__ Slope slope_of(const GptliteLoss& loss, float base, float inverse, float log_sum,
                                          int64_t target) {
  return Slope{base, (1.0f + 2.0f * loss.z_loss * log_sum) * inverse * loss.scale,
               loss.label_smoothing / static_cast<float>(loss.vocab_size) * loss.scale,
               (1.0f - loss.label_smoothing) * loss.scale, target};
}

// Writes the gradient in the row's place; from `kept`, if not NULL.
template <typename T>
__device__ __forceinline__ void write_gradient(T* x, const Run& run, const Pack<T, kFullPack<T>>* kept,
                                               const Slope& slope) {
  constexpr int V = kFullPack<T>;
  const uint32_t block = blockDim.x;
  for (uint32_t first = threadIdx.x; first < run.packs; first += kPacksAtOnce * block) {
    Pack<T, V> packs[kPacksAtOnce];
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      const uint32_t pack = first + i * block;
      if (pack < run.packs) packs[i] = kept != nullptr ? kept[pack] : load_pack<V>(x + run.head + int64_t{pack} * V);
    }
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      const uint32_t pack = first + i * block;
      if (pack >= run.packs) break;
      slope.apply(packs[i], run.head + int64_t{pack} * V);
      store_pack<V>(x + run.head + int64_t{pack} * V, packs[i]);
    }
  }
  if (static_cast<int>(threadIdx.x) >= run.head + run.tail) return;
  const int64_t column = run.single(threadIdx.x);
  Pack<T, 1> single = load_pack<1>(x + column);
  slope.apply(single, column);
  store_pack<1>(x + column, single);
}

template <typename T>
__device__ __forceinline__ void write_zeros(T* x, const Run& run) {
  constexpr int V = kFullPack<T>;
  for (uint32_t i = threadIdx.x; i < run.packs; i += blockDim.x)
    store_pack<V>(x + run.head + int64_t{i} * V, Pack<T, V>{});
  if (static_cast<int>(threadIdx.x) < run.head + run.tail) x[run.single(threadIdx.x)] = T{};
}

template <typename T>
__global__ void __launch_bounds__(kMostBlock)
    whole_kernel(float* losses, Logits logits, bool want_gradient, bool keep) {
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
  // Read before a barrier: nothing is written until after it.
  const float hit = threadIdx.x == 0 && here ? to_float(x[target]) : NAN;
  auto* kept = keep ? reinterpret_cast<Pack<T, kFullPack<T>>*>(shared + kSlots) : nullptr;
  Online row = read_row(x, run, kept);
  row.reduce(shared);
  __syncthreads();  // a block of one warp has met no barrier yet
  const float log_sum = row.maximum + logf(row.sum);
  if (threadIdx.x == 0) {
    float value = log_sum - (1.0f - loss.label_smoothing) * hit + loss.z_loss * log_sum * log_sum;
    // Not a product with 0: the total may be infinite.
    if (loss.label_smoothing != 0.0f)
      value -= loss.label_smoothing / static_cast<float>(loss.vocab_size) * row.total;
    losses[blockIdx.x] = value;
  }
  if (want_gradient) write_gradient(x, run, kept, slope_of(loss, row.maximum, 1.0f / row.sum, log_sum, target));
}

template <typename T>
__global__ void __launch_bounds__(kBlock) stats_kernel(float* stats, Logits logits) {
  GPTLITE_SHARED(float, shared);
  const T* x = logits.row<T>();
  Online row = read_row<T>(x, Run::of(x, logits.columns), nullptr);
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
  const float log = log_sum[blockIdx.x];
  write_gradient<T>(x, run, nullptr, slope_of(logits.loss, log, 1.0f, log, logits.target()));
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
  const bool keep = want_gradient && kept <= limit && allow_shared(whole_kernel<T>, kept);
  // One block a processor must keep the memory busy alone.
  const int block = block_for(logits.columns, kFullPack<T>, keep && 2 * kept > limit ? kMostBlock : kBlock);
  return launch(whole_kernel<T>, logits.rows, block, keep ? kept : slots, stream, losses, logits, want_gradient, keep);
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
