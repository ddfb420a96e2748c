// Quantization of a matrix to fp8 with one scale, in one or both layouts.
#include "fp8.h"
#include "parallel.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

constexpr int64_t kTile = 64;  // rows and columns, so that both layouts of a tile stay in the cache

template <class Format, class T>
void quantize_rows(uint8_t* y, uint8_t* transposed, const T* x, float scale, int64_t rows, int64_t width, int64_t first,
                   int64_t last) {
  for (int64_t start = 0; start < width; start += kTile) {
    const int64_t end = start + kTile < width ? start + kTile : width;
    for (int64_t row = first; row < last; ++row) {
      for (int64_t column = start; column < end; ++column)
        y[row * width + column] = static_cast<uint8_t>(fp8_bits<Format>(to_float(x[row * width + column]) / scale));
    }
    if (transposed == nullptr) continue;
    for (int64_t column = start; column < end; ++column) {
      for (int64_t row = first; row < last; ++row) transposed[column * rows + row] = y[row * width + column];
    }
  }
}

template <class Format>
int quantize(void* y, void* transposed, float* scale, const void* x, const float* amax, int64_t rows, int64_t width,
             int dtype, const void* context) {
  const float size = *amax < kSmallestAmax ? kSmallestAmax : *amax;  // NaN stays
  *scale = size / Format::kLargest;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t tiles = (rows + kTile - 1) / kTile;
    parallel(context, tiles, task_items(kTile * width), [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile)
        quantize_rows<Format>(static_cast<uint8_t*>(y), static_cast<uint8_t*>(transposed), static_cast<const T*>(x),
                              *scale, rows, width, tile * kTile,
                              (tile + 1) * kTile < rows ? (tile + 1) * kTile : rows);
    });
    return 0;
  });
}

}  // namespace

int quantize_fp8(void* y, void* transposed, float* scale, const void* x, const float* amax, int64_t rows, int64_t width,
                 int e5m2, int dtype, void* context) {
  return (e5m2 ? quantize<E5m2> : quantize<E4m3>)(y, transposed, scale, x, amax, rows, width, dtype, context);
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
