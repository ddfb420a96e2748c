// Sum of an embedding's gradient rows by token, added to the gradient of its weight.
//
// Grid: a block per place in the sorted tokens and range of 32 packs of columns. Only the block at the first place of a
// token works, on all rows of the token. Block: 4 warps. A lane has a pack of columns, and each warp adds every fourth
// row, with four loads in flight. The first warp adds the sums of the warps, always in the same order.
//
// Traffic: each row of dy is read once, and each row of the weight's gradient whose token occurs is read and written
// once. A gradient of its own would be written as zeros, read and written for the tokens, and added in another pass.
#include "dtype.cuh"
#include "reduce.cuh"

namespace gptlite {
namespace {

constexpr int kWarps = 4;
constexpr int kAtOnce = 4;  // rows that a thread loads before it uses them

struct TokenRows {
  float* table;
  const void* dy;
  const int64_t* tokens;  // sorted
  const int64_t* order;   // rows of dy in the order of `tokens`
  int64_t rows;
  int64_t width;
  int64_t tiles;  // ranges of 32 packs of columns
};

template <typename T, int V>
__global__ void __launch_bounds__(kWarps* kWarp) add_rows_kernel(TokenRows r) {
  GPTLITE_SHARED(float, shared);
  const int64_t first = blockIdx.x / r.tiles, token = r.tokens[first];
  if (first > 0 && r.tokens[first - 1] == token) return;  // the whole block
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t column = (blockIdx.x % r.tiles * kWarp + lane) * V;
  const T* dy = static_cast<const T*>(r.dy) + column;
  float sum[V] = {};
  for (int64_t i = first + warp; column < r.width && i < r.rows && r.tokens[i] == token; i += kAtOnce * kWarps) {
    Pack<T, V> packs[kAtOnce];
    bool mine[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t place = i + k * kWarps;
      mine[k] = place < r.rows && r.tokens[place] == token;
      if (mine[k]) packs[k] = load_pack<V>(dy + r.order[place] * r.width);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += mine[k] ? packs[k].at(j) : 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < V; ++j) shared[j * kWarps * kWarp + threadIdx.x] = sum[j];
  __syncthreads();
  if (warp != 0 || column >= r.width) return;
  float* out = r.table + token * r.width + column;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    for (int w = 1; w < kWarps; ++w) sum[j] += shared[(j * kWarps + w) * kWarp + lane];
    sum[j] += out[j];
  }
  if constexpr (V == 1) *out = sum[0];
  else store_floats<V>(out, sum);
}

template <typename T, int V>
int add_rows(TokenRows r, void* stream) {
  r.tiles = divide_up(divide_up(r.width, V), kWarp);
  return launch(add_rows_kernel<T, V>, r.rows * r.tiles, kWarps * kWarp, kWarps * kWarp * V * sizeof(float), stream, r);
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_add_token_rows(float* table, const void* dy, const int64_t* tokens, const int64_t* order, int64_t rows,
                                int64_t width, int dtype, void* stream) {
  using namespace gptlite;
  const TokenRows r = {table, dy, tokens, order, rows, width, 0};
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int V = kFullPack<T>;
    const bool packs = width % V == 0 && aligned(table, dy);
    return packs ? add_rows<T, V>(r, stream) : add_rows<T, 1>(r, stream);
  });
}
