// Helpers shared by the forward and backward pass over blocks of queries and keys. The scores of a block are
// transposed, [keys, queries]: the lanes of a vector are queries, so the maximum and the sum over keys need no
// reduction across lanes. `Math` (Fp32Math or Bf16Math) defines the layout of the matrix operands and multiplies them.
#pragma once

#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "attention_transpose.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr int64_t kQueryBlock = 64;

// Copies `count` rows from `first` on to rows of `padded` elements, and fills up to `rows` rows with zeros. Returns
// whether all elements are finite.
template <class Math, class T>
static inline bool load_rows(typename Math::Element* to, const Head<const T>& from, int64_t first, int64_t count,
                             int64_t rows, int64_t width, int64_t padded) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= Math::load_row(to + i * padded, from.row(first + i), width, padded);
  if (rows > count) memset(to + count * padded, 0, (rows - count) * padded * sizeof *to);
  return finite;
}

// Stores fp32 rows from their transpose `columns` [padded, kQueryBlock], multiplied by `scale`. `rows` is scratch
// memory.
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
// Selects `seen` in the lanes whose query sees key `row` of the block, else `unseen`. Lane i sees keys up to bound + i.
GPTLITE_INLINE Vec where_seen(int64_t row, int64_t bound, Vec seen, Vec unseen) {
  return select(less(lane_numbers(), broadcast(static_cast<float>(row - bound))), unseen, seen);
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
