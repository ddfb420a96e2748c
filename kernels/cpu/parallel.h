// Parallel loops over tasks, on the threads of the caller's context (GptliteThreads).
#pragma once

#include <stdint.h>

#include "gptlite_kernels.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr int64_t kTaskElements = 32768;  // minimum per thread; fewer do not pay for waking one

// Returns the number of items, of `elements` elements each, that make a task of at least kTaskElements.
static inline int64_t task_items(int64_t elements) {
  return elements >= kTaskElements ? 1 : kTaskElements / (elements + 1) + 1;
}

// Calls body(first, last) on ranges of at least `grain` items that cover [0, count), in parallel if the context has
// threads.
template <class Body>
static inline void parallel(const void* context, int64_t count, int64_t grain, Body body) {
  if (count <= 0) return;
  if (context == nullptr || count <= grain) {
    body(int64_t{0}, count);
    return;
  }
  const auto call = [](void* state, int64_t first, int64_t last) { (*static_cast<Body*>(state))(first, last); };
  static_cast<const GptliteThreads*>(context)->parallel_for(0, count, grain, call, &body);
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
