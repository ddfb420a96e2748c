// Second stage of column sums (columns.cuh): adds the parts [parts, width], fp32, of each sum to one row [width].
#include "columns.cuh"
#include "reduce.cuh"

namespace gptlite {
namespace {

constexpr int kWarps = 32;

// Grid: `tiles` blocks of 32 columns per sum. Block: 32 warps. A lane has a column. Each warp adds every 32nd part, and
// the first warp adds the sums of the warps, always in the same order. The division among warps keeps chains of
// dependent loads short. Each part is read once, usually from the L2 cache, where the first stage has just written it.
__global__ void __launch_bounds__(kWarps* kWarp) add_parts_kernel(ColumnSums sums, int64_t tiles) {
  GPTLITE_SHARED(float, shared);
  const int which = static_cast<int>(blockIdx.x / tiles);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = blockIdx.x % tiles * kWarp + lane;
  const float* parts = sums.parts + which * sums.count * sums.width;
  float sum = 0.0f;
  if (column < sums.width) {
#pragma unroll 8
    for (int64_t i = warp; i < sums.count; i += kWarps) sum += parts[i * sums.width + column];
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  void* out = which == 0 ? sums.out[0] : which == 1 ? sums.out[1] : sums.out[2];
  if (warp != 0 || column >= sums.width || out == nullptr) return;
  for (int w = 1; w < kWarps; ++w) sum += shared[w * kWarp + lane];
  store_float(out, sums.dtype, column, sum);
}

}  // namespace

int add_parts(const ColumnSums& sums, void* stream) {
  int64_t last = 0;
  for (int i = 0; i < kMaxSums; ++i) last = sums.out[i] != nullptr ? i + 1 : last;
  const int64_t tiles = divide_up(sums.width, kWarp);
  return launch(add_parts_kernel, tiles * last, kWarps * kWarp, kWarps * kWarp * sizeof(float), stream, sums, tiles);
}

}  // namespace gptlite
