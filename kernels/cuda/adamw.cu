// AdamW (arXiv:1711.05101) and Adam (arXiv:1412.6980) over many tensors; gptlite_kernels.h has the formula.
//
// Traffic: each element's parameter and two moments are read and written once, and its gradient is read once. That is
// the minimum: 24 bytes plus the gradient. A 16-bit copy of the parameter adds 2 bytes. Tensors are passed in lists of
// 56, as kernel arguments. The step counts, the gradient scale, found_inf and rate stay on the device, so nothing waits for
// the host. A second kernel increments the step counts, because all blocks of a tensor read them.
#include "flat.cuh"

namespace gptlite {
namespace {

constexpr int64_t kChunk = 16384;
constexpr int kBlock = 256;
constexpr int kListed = 56;  // limited by the 4 KB of kernel arguments

struct Tensors {
  GptliteAdam tensor[kListed];
  int first[kListed];
  int listed;
};

struct Options {
  double lr;
  double beta1;
  double beta2;
  float eps;
  float weight_decay;
  bool adam;
  const float* scale;
  const float* found_inf;
  const double* rate;
};

// Factors of the update that are the same for all elements of a tensor.
struct Step {
  float scale;
  float decay;      // lr * weight_decay, or 0 for Adam
  float step_size;  // lr / bias1
  float root;       // 1 / sqrt(bias2)
};

__device__ Step step_of(const Options& options, float steps) {
  const double bias1 = 1.0 - pow(options.beta1, static_cast<double>(steps) + 1.0);
  const double bias2 = 1.0 - pow(options.beta2, static_cast<double>(steps) + 1.0);
  const double lr = options.rate != nullptr ? options.rate[0] : options.lr;
  return Step{options.scale != nullptr ? options.scale[0] : 1.0f,
              static_cast<float>(options.adam ? 0.0 : lr * options.weight_decay),
              static_cast<float>(lr / bias1), static_cast<float>(1.0 / sqrt(bias2))};
}

// Number of elements that one load or store moves of V elements: V, or 16 bytes of them if that is less.
template <int V, typename T>
constexpr int kPart = V < kFullPack<T> ? V : kFullPack<T>;

template <int V, typename T>
__device__ __forceinline__ void load_all(float* out, const T* at) {
#pragma unroll
  for (int k = 0; k < V; k += kPart<V, T>) load_floats<kPart<V, T>>(out + k, at + k);
}

template <int V, typename T>
__device__ __forceinline__ void store_all(T* at, const float* values) {
#pragma unroll
  for (int k = 0; k < V; k += kPart<V, T>) store_floats<kPart<V, T>>(at + k, values + k);
}

template <int V, typename T>
__device__ __forceinline__ bool aligned(const void* at) {
  return reinterpret_cast<uintptr_t>(at) % (kPart<V, T> * sizeof(T)) == 0;
}

// Updates V elements from index `at` on. T is the gradient's type. C is the type of the copy, or float for no copy.
template <typename T, typename C, int V>
__device__ __forceinline__ void update(const GptliteAdam& tensor, const Options& options, const Step& step,
                                       int64_t at) {
  float p[V], m[V], v[V], g[V];
  load_all<V>(p, tensor.parameter + at);
  load_all<V>(m, tensor.exp_avg + at);
  load_all<V>(v, tensor.exp_avg_sq + at);
  load_all<V>(g, static_cast<const T*>(tensor.gradient) + at);
  const float beta1 = static_cast<float>(options.beta1), beta2 = static_cast<float>(options.beta2);
  const float rest1 = static_cast<float>(1.0 - options.beta1), rest2 = static_cast<float>(1.0 - options.beta2);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    g[k] *= step.scale;
    if (options.adam) g[k] = fmaf(options.weight_decay, p[k], g[k]);
    m[k] = fmaf(beta1, m[k], rest1 * g[k]);
    v[k] = fmaf(beta2, v[k], rest2 * g[k] * g[k]);
    p[k] -= fmaf(step.decay, p[k], step.step_size * m[k] / (sqrtf(v[k]) * step.root + options.eps));
  }
  store_all<V>(tensor.parameter + at, p);
  store_all<V>(tensor.exp_avg + at, m);
  store_all<V>(tensor.exp_avg_sq + at, v);
  if constexpr (!std::is_same<C, float>::value) store_all<V>(static_cast<C*>(tensor.copy) + at, p);
}

// Updates elements start to end - 1 of a tensor, in packs if all its arrays are aligned. The rest are single elements.
template <typename T, typename C>
__device__ __forceinline__ void update_all(const GptliteAdam& tensor, const Options& options, const Step& step,
                                           int64_t start, int64_t end) {
  constexpr int V = kFullPack<C>;
  const bool packs = aligned<V, float>(tensor.parameter) && aligned<V, float>(tensor.exp_avg) &&
                     aligned<V, float>(tensor.exp_avg_sq) && aligned<V, T>(tensor.gradient) &&
                     aligned<V, C>(tensor.copy);
  int64_t single = start;
  if (packs) {
    single = start + (end - start) / V * V;
    for (int64_t at = start + threadIdx.x * V; at < single; at += kBlock * V)
      update<T, C, V>(tensor, options, step, at);
  }
  for (int64_t at = single + threadIdx.x; at < end; at += kBlock) update<T, C, 1>(tensor, options, step, at);
}

// Grid: ceil(count / 16384) blocks per tensor of the list. Block: 256 threads, for 16384 elements of one tensor. A
// thread updates every 256th pack of them.
template <typename T>
__global__ void __launch_bounds__(kBlock) adamw_kernel(Tensors tensors, Options options) {
  GPTLITE_SHARED(Step, shared);
  if (options.found_inf != nullptr && options.found_inf[0] != 0.0f) return;
  const int which = find_tensor(tensors.first, tensors.listed, blockIdx.x);
  const GptliteAdam& tensor = tensors.tensor[which];
  if (threadIdx.x == 0) *shared = step_of(options, tensor.step[0]);
  __syncthreads();
  const Step step = *shared;
  const int64_t start = (static_cast<int>(blockIdx.x) - tensors.first[which]) * kChunk;
  const int64_t end = tensor.count - start < kChunk ? tensor.count : start + kChunk;
  if (tensor.copy == nullptr)
    update_all<T, float>(tensor, options, step, start, end);
  else if (tensor.copy_dtype == GPTLITE_BF16)
    update_all<T, Bf16>(tensor, options, step, start, end);
  else
    update_all<T, Fp16>(tensor, options, step, start, end);
}

// One block of 56 threads. Each thread increments the step count of one tensor, unless the step is skipped.
__global__ void __launch_bounds__(kListed) advance_steps(Tensors tensors, const float* found_inf) {
  if (found_inf != nullptr && found_inf[0] != 0.0f) return;
  if (static_cast<int>(threadIdx.x) < tensors.listed) tensors.tensor[threadIdx.x].step[0] += 1.0f;
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_adamw(const GptliteAdam* tensors, int64_t num_tensors, double lr, double beta1, double beta2,
                       double eps, double weight_decay, int adam, const float* scale, const float* found_inf,
                       const double* rate, int dtype, void* stream) {
  using namespace gptlite;
  const Options options = {lr, beta1, beta2, static_cast<float>(eps), static_cast<float>(weight_decay), adam != 0,
                           scale, found_inf, rate};
  for (int64_t begin = 0; begin < num_tensors; begin += kListed) {
    Tensors list = {};
    int64_t blocks = 0;
    for (int64_t i = begin; i < num_tensors && list.listed < kListed; ++i, ++list.listed) {
      list.tensor[list.listed] = tensors[i];
      list.first[list.listed] = static_cast<int>(blocks);
      blocks += divide_up(tensors[i].count, kChunk);
    }
    int error = by_dtype(dtype, [&](auto element) {
      return launch(adamw_kernel<decltype(element)>, blocks, kBlock, sizeof(Step), stream, list, options);
    });
    if (error == 0) error = launch(advance_steps, 1, kListed, 0, stream, list, found_inf);
    if (error != 0) return error;
  }
  return 0;
}
