// Causal attention of bf16 by AVX512-BF16, for CPUs without AMX.
#include <immintrin.h>
#include <string.h>

#include "attention.h"
#include "attention_backward.h"
#include "attention_bf16.h"
#include "attention_forward.h"

namespace gptlite {
namespace avx512_bf16 {

struct PairDots {
  // c [32, 32] (+)= a b over `depth`.
  static void multiply(float* c, int64_t c_stride, const uint16_t* a, int64_t a_stride, const uint16_t* b,
                       int64_t b_stride, int64_t depth, bool add) {
    for (int64_t row = 0; row < 32; row += kRows) {
      multiply_rows(c + row * c_stride, c_stride, a + row * a_stride, a_stride, b, b_stride, depth, add);
    }
  }

 private:
  static constexpr int kRows = 8;

  GPTLITE_INLINE void multiply_rows(float* c, int64_t c_stride, const uint16_t* a, int64_t a_stride, const uint16_t* b,
                                    int64_t b_stride, int64_t depth, bool add) {
    __m512 sums[kRows][2];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      sums[row][0] = add ? _mm512_loadu_ps(c + row * c_stride) : _mm512_setzero_ps();
      sums[row][1] = add ? _mm512_loadu_ps(c + row * c_stride + 16) : _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < depth; k += 2) {
      const __m512bh first = (__m512bh)_mm512_loadu_si512(b + k * b_stride);
      const __m512bh second = (__m512bh)_mm512_loadu_si512(b + k * b_stride + 32);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        int pair;
        memcpy(&pair, a + row * a_stride + k, sizeof pair);
        const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
        sums[row][0] = _mm512_dpbf16_ps(sums[row][0], left, first);
        sums[row][1] = _mm512_dpbf16_ps(sums[row][1], left, second);
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      _mm512_storeu_ps(c + row * c_stride, sums[row][0]);
      _mm512_storeu_ps(c + row * c_stride + 16, sums[row][1]);
    }
  }
};

int attention_forward(const GptliteHeads* out, float* lse, const GptliteHeads* q, const GptliteHeads* k,
                      const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width,
                      float scale, int dtype, void* context) {
  if (dtype != GPTLITE_BF16) return GPTLITE_UNSUPPORTED;
  const AttentionShape shape{batch, heads, queries, keys, width, scale};
  return forward_by_blocks<Bf16Math<PairDots>, Bf16>(out, lse, q, k, v, shape, context);
}

int attention_backward(const GptliteHeads* dq, const GptliteHeads* dk, const GptliteHeads* dv, const GptliteHeads* dout,
                       const GptliteHeads* out, const float* lse, const GptliteHeads* q, const GptliteHeads* k,
                       const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                       int64_t width, float scale, int dtype, void* context) {
  if (dtype != GPTLITE_BF16) return GPTLITE_UNSUPPORTED;
  const AttentionShape shape{batch, heads, queries, keys, width, scale};
  return backward_by_blocks<Bf16Math<PairDots>, Bf16>(dq, dk, dv, dout, out, lse, q, k, v, shape, context);
}

}  // namespace avx512_bf16
}  // namespace gptlite
