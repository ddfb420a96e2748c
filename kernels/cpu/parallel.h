// Runs a body on ranges of tasks, in parallel where the context has threads.
#pragma once

#include <stdint.h>

#include "gptlite_kernels.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr int64_t kTaskElements = 32768;  // at least as many elements to a thread: less is not worth waking one

// How many items of `elements` elements each make a task.
static inline int64_t task_items(int64_t elements) {
  return elements >= kTaskElements ? 1 : kTaskElements / (elements + 1) + 1;
}

// body(first, last) on ranges that cover [0, count), of at least `grain` items.
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
