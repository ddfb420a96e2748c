// Causal attention for bf16, with dot products of bf16 (pair_dots.h), for CPUs without AMX.
#include "attention.h"
#include "attention_backward.h"
#include "attention_bf16.h"
#include "attention_forward.h"
#include "pair_dots.h"

namespace gptlite {
namespace GPTLITE_ISA {

int attention_forward(const GptliteHeads* out, float* lse, const GptliteHeads* q, const GptliteHeads* k,
                      const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width,
                      float scale, int64_t window, int dtype, void* context) {
  if (dtype != GPTLITE_BF16) return GPTLITE_UNSUPPORTED;
  const AttentionShape shape{batch, heads, queries, keys, width, scale, window};
  return forward_by_blocks<Bf16Math<PairDots>, Bf16>(out, lse, q, k, v, shape, context);
}

int attention_backward(const GptliteHeads* dq, const GptliteHeads* dk, const GptliteHeads* dv, const GptliteHeads* dout,
                       const GptliteHeads* out, const float* lse, const GptliteHeads* q, const GptliteHeads* k,
                       const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                       int64_t width, float scale, int64_t window, int dtype, void* context) {
  if (dtype != GPTLITE_BF16) return GPTLITE_UNSUPPORTED;
  const AttentionShape shape{batch, heads, queries, keys, width, scale, window};
  return backward_by_blocks<Bf16Math<PairDots>, Bf16>(dq, dk, dv, dout, out, lse, q, k, v, shape, context);
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
