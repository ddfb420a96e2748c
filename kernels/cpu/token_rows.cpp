// Sum of an embedding's gradient rows by token, added to the gradient of its weight.
#include "parallel.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

int add_token_rows(float* table, const void* dy, const int64_t* tokens, const int64_t* order, int64_t rows,
                   int64_t width, int dtype, void* context) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel(context, rows, task_items(width), [&](int64_t begin, int64_t end) {
      // A task has the tokens whose first place is in its range, with all their rows.
      for (int64_t first = begin; first < end; ++first) {
        if (first > 0 && tokens[first - 1] == tokens[first]) continue;
        float* const out = table + tokens[first] * width;
        for_columns<1>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
          Vec total = {};
          for (int64_t i = first; i < rows && tokens[i] == tokens[first]; ++i) {
            total += load(static_cast<const T*>(dy) + order[i] * width + column, lanes);
          }
          store(out + column, load(out + column, lanes) + total, lanes);
        });
      }
    });
    return 0;
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
