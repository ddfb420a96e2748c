// What the forward and the backward pass by blocks share. A block's scores stand transposed, [keys, queries]: the lanes
// of a vector are queries, so that maxima and sums of rows need nothing across lanes. `Math` says what the operands of
// products are and multiplies them: Fp32Math, Bf16Math.
#pragma once

#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "attention_transpose.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr int64_t kQueryBlock = 64;

// `count` rows from `first` on, as rows of `padded` elements; zeros up to `rows`. Returns whether all are finite.
template <class Math, class T>
static inline bool load_rows(typename Math::Element* to, const Head<const T>& from, int64_t first, int64_t count,
                             int64_t rows, int64_t width, int64_t padded) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= Math::load_row(to + i * padded, from.row(first + i), width, padded);
  if (rows > count) memset(to + count * padded, 0, (rows - count) * padded * sizeof *to);
  return finite;
}

// Rows of fp32 that stand transposed, [padded, kQueryBlock], times `scale`; `rows` is memory for them.
template <class Math, class T>
static inline void store_transposed(const Head<T>& to, int64_t first, int64_t count, const float* columns, float* rows,
                                    int64_t lanes, int64_t width, int64_t padded, float scale) {
  transpose(rows, padded, columns, kQueryBlock, padded, lanes);
  for (int64_t i = 0; i < count; ++i) Math::store_row(to.row(first + i), rows + i * padded, width, scale);
}

GPTLITE_INLINE Vec lane_numbers() {
  alignas(64) float numbers[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = static_cast<float>(lane);
  return load(numbers, All{});
}
// Lane i sees the rows of a block of scores up to bound + i.
GPTLITE_INLINE Vec where_seen(int64_t row, int64_t bound, Vec seen, Vec unseen) {
  return select(less(lane_numbers(), broadcast(static_cast<float>(row - bound))), unseen, seen);
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
