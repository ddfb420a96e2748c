// Gradient of a packed qkv tensor from those of q, k and v, and its sum over tokens, the gradient of a bias.
#include "column_sums.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

template <class T, class W>
void join(T* out, W* dbias, float* workspace, const T* q, const T* k, const T* v, int64_t tokens, int64_t groups,
          int64_t queries, int64_t width, const void* context) {
  const int64_t row = groups * (queries + 2) * width;
  const Parts parts = parts_of(row == 0 ? 0 : tokens, row);
  for_parts(context, parts, tokens, [&](int64_t part, int64_t first, int64_t last) {
    float* const sums = workspace + part * row;
    memset(sums, 0, static_cast<size_t>(row) * sizeof(float));
    for (int64_t token = first; token < last; ++token) {
      for (int64_t group = 0, at = 0; group < groups; ++group) {
        const int64_t here = token * groups + group;
        for (int64_t place = 0; place < queries + 2; ++place, at += width) {
          const T* const from = place < queries ? q + (here * queries + place) * width
                                                : (place == queries ? k : v) + here * width;
          memcpy(out + token * row + at, from, static_cast<size_t>(width) * sizeof(T));
          for_columns<1>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
            store(sums + at + column, load(sums + at + column, lanes) + load(from + column, lanes), lanes);
          });
        }
      }
    }
  });
  if (dbias) sum_parts(context, dbias, workspace, parts.count, row);
}

}  // namespace

int join_heads(void* dqkv, void* dbias, float* workspace, const void* dq, const void* dk, const void* dv,
               int64_t tokens, int64_t groups, int64_t queries, int64_t width, int dtype, int bias_dtype,
               void* context) {
  return with_dtype(dtype, [&](auto element) {
    return with_dtype(bias_dtype, [&](auto bias_element) {
      using T = decltype(element);
      join(static_cast<T*>(dqkv), static_cast<decltype(bias_element)*>(dbias), workspace, static_cast<const T*>(dq),
           static_cast<const T*>(dk), static_cast<const T*>(dv), tokens, groups, queries, width, context);
      return 0;
    });
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
