// Many tensors as if they were one, their elements in a line: a few large ones and hundreds of tiny ones cost the same.
#pragma once

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// Where the line's place, `offset` elements after the start of a tensor, cuts the tensor: between whole vectors.
static inline int64_t cut(int64_t offset, int64_t count) {
  if (offset <= 0) return 0;
  const int64_t rounded = (offset + kLanes - 1) / kLanes * kLanes;
  return rounded < count ? rounded : count;
}

// body(tensor, from, to) for all parts of tensors between the line's places `first` and `last`, in order. What lies on
// which side of a place depends on that place alone.
template <class Count, class Body>
static inline void for_parts(int64_t num_tensors, Count count_of, int64_t first, int64_t last, Body body) {
  int64_t start = 0;
  for (int64_t tensor = 0; tensor < num_tensors && start < last; ++tensor) {
    const int64_t count = count_of(tensor), from = cut(first - start, count), to = cut(last - start, count);
    if (from < to) body(tensor, from, to);
    start += count;
  }
}

// All their elements.
template <class Count>
static inline int64_t line_length(int64_t num_tensors, Count count_of) {
  int64_t length = 0;
  for (int64_t tensor = 0; tensor < num_tensors; ++tensor) length += count_of(tensor);
  return length;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
