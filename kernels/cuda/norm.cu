// L2 norm over all elements of many tensors, such as the gradients of a model: the square root of the sum of squares.
//
// A first kernel writes one partial sum for every 65536 elements, a second kernel adds the partial sums. Squares are
// added in fp32 within a pack of 16 bytes, and in fp64 from there on. Every element is read once, the minimum traffic.
// Tensors are passed in lists of 128, as kernel arguments, so nothing is copied to the device and nothing waits for the
// host.
#include "flat.cuh"
#include "reduce.cuh"

namespace gptlite {
namespace {

constexpr int64_t kChunk = 65536;  // gptlite_norm_workspace uses the same number
constexpr int kBlock = 512;
constexpr int kFinalBlock = 1024;
constexpr int kPacksAtOnce = 4;
constexpr int kListed = 128;

struct Tensors {
  const void* data[kListed];
  int64_t count[kListed];
  int first[kListed];
  int listed;
};

// Adds `value` over the block. Only thread 0 gets the sum.
__device__ __forceinline__ double block_sum(double value, double* shared) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  for (unsigned w = 1; threadIdx.x == 0 && w < blockDim.x / kWarp; ++w) value += shared[w];
  return value;
}

__device__ __forceinline__ float square(float x) { return x * x; }

// Stores a double in two floats, because the workspace need not be aligned to 8 bytes.
__device__ __forceinline__ void store_double(float* at, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  at[0] = __uint_as_float(static_cast<uint32_t>(bits));
  at[1] = __uint_as_float(static_cast<uint32_t>(bits >> 32));
}

__device__ __forceinline__ double load_double(const float* at) {
  const uint64_t bits = static_cast<uint64_t>(__float_as_uint(at[1])) << 32 | __float_as_uint(at[0]);
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Grid: ceil(count / 65536) blocks per tensor of the list. Block: 512 threads, for 65536 elements of one tensor, with
// four packs per thread in flight. Writes one double to `parts` for each block.
template <typename T>
__global__ void __launch_bounds__(kBlock) square_sums(float* parts, Tensors tensors) {
  GPTLITE_SHARED(double, shared);
  constexpr int V = kFullPack<T>;
  const int tensor = find_tensor(tensors.first, tensors.listed, blockIdx.x);
  const int64_t start = (static_cast<int>(blockIdx.x) - tensors.first[tensor]) * kChunk;
  const int64_t left = tensors.count[tensor] - start;
  const T* data = static_cast<const T*>(tensors.data[tensor]) + start;
  const Run run = Run::of(data, left < kChunk ? left : kChunk);
  double sum = 0.0;
  for (uint32_t first = threadIdx.x; first < run.packs; first += kPacksAtOnce * kBlock) {
    Pack<T, V> packs[kPacksAtOnce];
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      packs[i] = Pack<T, V>{};
      if (first + i * kBlock < run.packs) packs[i] = load_pack<V>(data + run.head + (first + i * kBlock) * V);
    }
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      float squares = 0.0f;
#pragma unroll
      for (int k = 0; k < V; ++k) squares += square(packs[i].at(k));
      sum += squares;
    }
  }
  if (static_cast<int>(threadIdx.x) < run.head + run.tail) sum += square(to_float(data[run.single(threadIdx.x)]));
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) store_double(parts + 2 * static_cast<int64_t>(blockIdx.x), sum);
}

// One block of 1024 threads, which adds the `count` partial sums.
__global__ void __launch_bounds__(kFinalBlock) root_of_sum(float* out, const float* parts, int64_t count) {
  GPTLITE_SHARED(double, shared);
  double sum = 0.0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < count; i += kFinalBlock) sum += load_double(parts + 2 * i);
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) out[0] = static_cast<float>(sqrt(sum));
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_norm(float* out, float* workspace, const void* const* tensors, const int64_t* counts,
                      int64_t num_tensors, int dtype, void* stream) {
  using namespace gptlite;
  int64_t parts = 0;
  for (int64_t begin = 0; begin < num_tensors; begin += kListed) {
    Tensors list = {};
    int64_t blocks = 0;
    for (int64_t i = begin; i < num_tensors && list.listed < kListed; ++i, ++list.listed) {
      list.data[list.listed] = tensors[i];
      list.count[list.listed] = counts[i];
      list.first[list.listed] = static_cast<int>(blocks);
      blocks += divide_up(counts[i], kChunk);
    }
    const int error = by_dtype(dtype, [&](auto element) {
      return launch(square_sums<decltype(element)>, blocks, kBlock, kBlock / kWarp * sizeof(double), stream,
                    workspace + 2 * parts, list);
    });
    if (error != 0) return error;
    parts += blocks;
  }
  return launch(root_of_sum, 1, kFinalBlock, kFinalBlock / kWarp * sizeof(double), stream, out, workspace, parts);
}
