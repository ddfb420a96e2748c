// Division of many tensors into tasks of equal size. The elements of all tensors are treated as one sequence (the
// "line"), so a few large tensors and hundreds of tiny ones balance equally well.
#pragma once

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// Returns where a boundary, `offset` elements after the start of a tensor, divides the tensor: rounded up to whole
// vectors, within [0, count].
static inline int64_t cut(int64_t offset, int64_t count) {
  if (offset <= 0) return 0;
  const int64_t rounded = (offset + kLanes - 1) / kLanes * kLanes;
  return rounded < count ? rounded : count;
}

// Calls body(tensor, from, to), in order, for the parts of tensors between positions `first` and `last` of the line.
// The rounding of a boundary depends only on its position, so adjacent ranges share no element and leave none out.
template <class Count, class Body>
static inline void for_parts(int64_t num_tensors, Count count_of, int64_t first, int64_t last, Body body) {
  int64_t start = 0;
  for (int64_t tensor = 0; tensor < num_tensors && start < last; ++tensor) {
    const int64_t count = count_of(tensor), from = cut(first - start, count), to = cut(last - start, count);
    if (from < to) body(tensor, from, to);
    start += count;
  }
}

// Returns the number of elements of all tensors.
template <class Count>
static inline int64_t line_length(int64_t num_tensors, Count count_of) {
  int64_t length = 0;
  for (int64_t tensor = 0; tensor < num_tensors; ++tensor) length += count_of(tensor);
  return length;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
