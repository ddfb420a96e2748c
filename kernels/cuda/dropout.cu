// Dropout (Srivastava et al., JMLR 2014) with a counter-based mask (philox.h). The backward pass is the same function
// of the gradient, so the mask is computed again and never stored.
//
// Traffic: x is read once and y is written once, 2 elements moved per element, the minimum. Philox takes ten rounds for
// four elements, about 20 instructions per element. For 16-bit elements, that is about as much as the memory traffic
// hides.
#include "dropout.cuh"

namespace gptlite {
namespace {

constexpr int kPacksAtOnce = 4;

// A row takes `threads` threads: a power of two up to a warp, with several rows per block of 128, or a whole block of
// up to 512. A thread loads four packs of its row before it stores them.
template <typename T, int V>
__global__ void __launch_bounds__(kLongBlock)
    dropout_kernel(T* y, const T* x, int64_t rows, int64_t heads, int64_t positions, int64_t width,
                   GptliteDropout dropout, int threads) {
  const RowThread at(threads);
  if (at.row >= rows) return;
  const DropoutRow place = place_of_row(dropout, at.row, heads, positions);
  const int64_t start = at.row * width, step = static_cast<int64_t>(threads) * V;
  for (int64_t first = static_cast<int64_t>(at.lane) * V; first < width; first += kPacksAtOnce * step) {
    float v[kPacksAtOnce][V];
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      if (first + i * step < width) load_floats<V>(v[i], x + start + first + i * step);
    }
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      const int64_t column = first + i * step;
      if (column >= width) break;
      drop<V>(v[i], dropout, place, column);
      store_floats<V>(y + start + column, v[i]);
    }
  }
}

template <typename T, int V>
int run(void* y, const void* x, int64_t rows, int64_t heads, int64_t positions, int64_t width,
        const GptliteDropout& dropout, void* stream) {
  constexpr int64_t kMost = kLongBlock * kPacksAtOnce * V;
  const RowGrid grid = row_grid(rows, width < kMost ? width : kMost, kPacksAtOnce * V);
  return launch(dropout_kernel<T, V>, grid.blocks, grid.block, 0, stream, static_cast<T*>(y), static_cast<const T*>(x),
                rows, heads, positions, width, dropout, grid.threads);
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_dropout(void* y, const void* x, int64_t batch, int64_t heads, int64_t positions, int64_t width,
                         const GptliteDropout* dropout, int dtype, void* stream) {
  using namespace gptlite;
  const int64_t rows = batch * heads * positions;
  if (width == 0) return 0;
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int V = kFullPack<T>;
    return rows_in_packs<T>(width) && aligned(y, x) ? run<T, V>(y, x, rows, heads, positions, width, *dropout, stream)
                                                    : run<T, 1>(y, x, rows, heads, positions, width, *dropout, stream);
  });
}
