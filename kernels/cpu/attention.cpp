// Causal attention, softmax(scale * q kᵀ + causal mask) v, for any dtype, in fp32 arithmetic.
#include "attention.h"

#include "attention_backward.h"
#include "attention_forward.h"
#include "attention_fp32.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

int attention_forward(const GptliteHeads* out, float* lse, const GptliteHeads* q, const GptliteHeads* k,
                      const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width,
                      float scale, int64_t window, int dtype, void* context) {
  const AttentionShape shape{batch, heads, queries, keys, width, scale, window};
  return with_dtype(dtype, [&](auto element) {
    return forward_by_blocks<Fp32Math, decltype(element)>(out, lse, q, k, v, shape, context);
  });
}

int attention_backward(const GptliteHeads* dq, const GptliteHeads* dk, const GptliteHeads* dv, const GptliteHeads* dout,
                       const GptliteHeads* out, const float* lse, const GptliteHeads* q, const GptliteHeads* k,
                       const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                       int64_t width, float scale, int64_t window, int dtype, void* context) {
  const AttentionShape shape{batch, heads, queries, keys, width, scale, window};
  return with_dtype(dtype, [&](auto element) {
    return backward_by_blocks<Fp32Math, decltype(element)>(dq, dk, dv, dout, out, lse, q, k, v, shape, context);
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
