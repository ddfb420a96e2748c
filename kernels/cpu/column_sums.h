// Column sums of a matrix, such as the gradient of a bias, in two stages: each part of the rows gives a row of partial
// sums, then the partial rows are added. The parts depend only on the shape of the matrix, so the result has the same
// bits with any number of threads.
#pragma once

#include <string.h>

#include "parallel.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr int64_t kMaxParts = 256;      // gptlite_rows_workspace has room for so many
constexpr int64_t kLeastPartRows = 16;  // with fewer, the cost of the partial rows would be noticeable

struct Parts {
  int64_t count;
  int64_t rows;  // per part; the last may have fewer
};

GPTLITE_INLINE Parts parts_of(int64_t rows, int64_t width) {
  int64_t each = (rows + kMaxParts - 1) / kMaxParts;
  if (each < kLeastPartRows) each = kLeastPartRows;
  if (each < task_items(width)) each = task_items(width);
  return Parts{(rows + each - 1) / each, each};
}

// Calls body(part, first_row, last_row) for each part of the rows, in parallel.
template <class Body>
static inline void for_parts(const void* context, Parts parts, int64_t rows, Body body) {
  parallel(context, parts.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t row = part * parts.rows;
      body(part, row, row + parts.rows < rows ? row + parts.rows : rows);
    }
  });
}

// Writes the sum of the partial rows [parts, width] to out [width].
template <class T>
static inline void sum_parts(const void* context, T* out, const float* partial, int64_t parts, int64_t width) {
  constexpr int64_t block = 16 * kLanes;
  const int64_t blocks = (width + block - 1) / block;
  parallel(context, blocks, task_items(block * parts), [&](int64_t first, int64_t last) {
    const int64_t begin = first * block, end = last * block < width ? last * block : width;
    for_columns<1>(end - begin, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
      Vec total = {};
      for (int64_t part = 0; part < parts; ++part) total += load(partial + part * width + begin + column, lanes);
      store(out + begin + column, total, lanes);
    });
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
