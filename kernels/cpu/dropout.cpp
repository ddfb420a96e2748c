// Dropout with the counter-based mask of philox.h, which is computed where it is used and never stored.
#include "parallel.h"
#include "random_words.h"

namespace gptlite {
namespace GPTLITE_ISA {

int dropout(void* y, const void* x, int64_t batch, int64_t heads, int64_t positions, int64_t width,
            const GptliteDropout* dropout, int dtype, void* context) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const float scale = dropout->scale;
    const uint32_t threshold = dropout->threshold;
    parallel(context, batch * heads * positions, task_items(4 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int64_t matrix = row / positions;
        const T* const in = static_cast<const T*>(x) + row * width;
        T* const out = static_cast<T*>(y) + row * width;
        const DropoutRow random_row = dropout_row(*dropout, matrix / heads, matrix % heads, row % positions);
        for_random_columns(random_row, width, [&](int64_t column, Words random, auto lanes) GPTLITE_LAMBDA {
          store(out + column, dropped_out(load(in + column, lanes), random, threshold, scale), lanes);
        });
      }
    });
    return 0;
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
