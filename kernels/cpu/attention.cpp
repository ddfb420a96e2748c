// Causal attention of any dtype by fp32 arithmetic; of bf16 by bf16 products where the CPU has them.
#include "attention.h"

#include "attention_backward.h"
#include "attention_forward.h"
#include "attention_fp32.h"
#include "isa.h"
#include "simd.h"

namespace gptlite {

#if defined(__AVX512F__)
namespace avx512_bf16 {
decltype(gptlite_cpu_attention_forward) attention_forward __attribute__((weak));
decltype(gptlite_cpu_attention_backward) attention_backward __attribute__((weak));
}  // namespace avx512_bf16
#endif

namespace GPTLITE_ISA {

int attention_forward(const GptliteHeads* out, float* lse, const GptliteHeads* q, const GptliteHeads* k,
                      const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width,
                      float scale, int dtype, void* context) {
#if defined(__AVX512F__)
  if (dtype == GPTLITE_BF16 && has_avx512_bf16() && avx512_bf16::attention_forward) {
    return avx512_bf16::attention_forward(out, lse, q, k, v, batch, heads, queries, keys, width, scale, dtype, context);
  }
#endif
  const AttentionShape shape{batch, heads, queries, keys, width, scale};
  return with_dtype(dtype, [&](auto element) {
    return forward_by_blocks<Fp32Math, decltype(element)>(out, lse, q, k, v, shape, context);
  });
}

int attention_backward(const GptliteHeads* dq, const GptliteHeads* dk, const GptliteHeads* dv, const GptliteHeads* dout,
                       const GptliteHeads* out, const float* lse, const GptliteHeads* q, const GptliteHeads* k,
                       const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                       int64_t width, float scale, int dtype, void* context) {
#if defined(__AVX512F__)
  if (dtype == GPTLITE_BF16 && has_avx512_bf16() && avx512_bf16::attention_backward) {
    return avx512_bf16::attention_backward(dq, dk, dv, dout, out, lse, q, k, v, batch, heads, queries, keys, width,
                                           scale, dtype, context);
  }
#endif
  const AttentionShape shape{batch, heads, queries, keys, width, scale};
  return with_dtype(dtype, [&](auto element) {
    return backward_by_blocks<Fp32Math, decltype(element)>(dq, dk, dv, dout, out, lse, q, k, v, shape, context);
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
