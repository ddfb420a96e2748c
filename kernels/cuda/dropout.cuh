// Dropout of packs of a row, with the counter-based mask of philox.h.
#pragma once

#include "../include/philox.h"
#include "row.cuh"

namespace gptlite {

// Applies dropout to v, which holds columns column to column + V - 1 of a row. Four columns share one call of Philox.
template <int V>
__device__ __forceinline__ void drop(float* v, const GptliteDropout& dropout, const DropoutRow& row, int64_t column) {
  if constexpr (V % 4 == 0) {
#pragma unroll
    for (int group = 0; group < V / 4; ++group) {
      const PhiloxWords words = dropout_words(row, column / 4 + group);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        v[group * 4 + k] = words.word[k] >= dropout.threshold ? v[group * 4 + k] * dropout.scale : 0.0f;
    }
  } else {
    static_assert(V == 1, "packs are of 1, 4 or 8");
    v[0] = dropout_keeps(row, dropout, column) ? v[0] * dropout.scale : 0.0f;
  }
}

// Returns the Philox counter and key of row `row` of a tensor [batch, heads, positions, width].
__device__ __forceinline__ DropoutRow place_of_row(const GptliteDropout& dropout, int64_t row, int64_t heads,
                                                   int64_t positions) {
  int64_t matrix, position, batch = 0, head = 0;
  divide(row, positions, &matrix, &position);
  if (heads == 1)
    batch = matrix;
  else
    divide(matrix, heads, &batch, &head);
  return dropout_row(dropout, batch, head, position);
}

}  // namespace gptlite
