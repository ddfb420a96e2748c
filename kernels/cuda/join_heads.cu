// Gradient of a packed qkv tensor from the gradients of q, k and v, which attention's backward pass writes to tensors of
// their own, and its sum over tokens, the gradient of the QKV projection's bias.
//
// Grid (columns.cuh): a thread stays in a pack of columns of the packed tensor, so it reads a single head of dq, dk or
// dv, and advances down the tokens with four loads in flight. The sums are kept in registers and written in at most 256
// parts, which column_sums.cu adds.
//
// Traffic, the minimum: each element is read and written once. The sum adds nothing.
#include "columns.cuh"

namespace gptlite {
namespace {

// Gradients of q [tokens, groups * queries, width], and of k and v [tokens, groups, width].
struct HeadGradients {
  const void* q;
  const void* k;
  const void* v;
  int64_t tokens;
  int64_t groups;
  int64_t queries;  // per group, before its k and v
  int64_t width;

  __device__ __forceinline__ int64_t columns() const { return groups * (queries + 2) * width; }
};

// V: columns of a thread, all of one head. `parts` is NULL if the sum is not wanted.
template <typename T, int V>
__global__ void __launch_bounds__(kColumnBlock) join_kernel(T* out, float* parts, HeadGradients from, ColumnGrid grid) {
  GPTLITE_SHARED(float, shared);
  const ColumnThread at(grid, V);
  const int64_t columns = from.columns(), slot = at.column / from.width, rows = from.queries + 2;
  const int64_t group = slot / rows, place = slot % rows;
  const bool query = place < from.queries;
  const int64_t head = query ? group * from.queries + place : group;
  const int64_t stride = (query ? from.groups * from.queries : from.groups) * from.width;
  const void* part = query ? from.q : place == from.queries ? from.k : from.v;
  const T* in = static_cast<const T*>(part) + head * from.width + at.column % from.width;
  float sum[V] = {};
  for (int64_t row = at.row; row < from.tokens && at.column < columns; row += kRowsAtOnce * at.step) {
    Pack<T, V> packs[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step < from.tokens) packs[i] = load_pack<V>(in + (row + i * at.step) * stride);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (row + i * at.step >= from.tokens) continue;
      store_pack<V>(out + (row + i * at.step) * columns + at.column, packs[i]);
#pragma unroll
      for (int k = 0; k < V; ++k) sum[k] += packs[i].at(k);
    }
  }
  if (parts != nullptr) store_part<V>(parts, sum, grid, at, columns, shared);
}

template <typename T, int V>
int join(void* out, void* dbias, float* parts, const HeadGradients& from, int64_t columns, int bias_dtype,
         void* stream) {
  const ColumnGrid grid = column_grid(from.tokens, columns, V, kMaxParts);
  const int error = launch(join_kernel<T, V>, grid.blocks(), grid.block(), grid.block() * V * sizeof(float), stream,
                           static_cast<T*>(out), dbias != nullptr ? parts : nullptr, from, grid);
  if (error != 0) return error;
  return add_parts(ColumnSums{{dbias, nullptr, nullptr}, parts, grid.chunks, columns, bias_dtype}, stream);
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_join_heads(void* dqkv, void* dbias, float* workspace, const void* dq, const void* dk, const void* dv,
                            int64_t tokens, int64_t groups, int64_t queries, int64_t width, int dtype, int bias_dtype,
                            void* stream) {
  using namespace gptlite;
  const HeadGradients from = {dq, dk, dv, tokens, groups, queries, width};
  const int64_t columns = groups * (queries + 2) * width;
  if (!is_float_dtype(bias_dtype)) return static_cast<int>(cudaErrorInvalidValue);
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int V = kFullPack<T>;
    const bool packs = width % V == 0 && aligned(dqkv, dq, dk, dv);
    return packs ? join<T, V>(dqkv, dbias, workspace, from, columns, bias_dtype, stream)
                 : join<T, 1>(dqkv, dbias, workspace, from, columns, bias_dtype, stream);
  });
}
