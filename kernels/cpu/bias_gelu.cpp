// GELU of a sum of rows and a bias, of any dtype; of bf16 with the CPU's own rounding where it has one.
#include "bias_gelu.h"
#include "isa.h"

namespace gptlite {

#if defined(__AVX512F__)
namespace avx512_bf16 {
decltype(gptlite_cpu_bias_gelu_forward) bias_gelu_forward __attribute__((weak));
decltype(gptlite_cpu_bias_gelu_backward) bias_gelu_backward __attribute__((weak));
}  // namespace avx512_bf16
#endif

namespace GPTLITE_ISA {

int bias_gelu_forward(void* y, const void* x, const void* bias, int64_t rows, int64_t width, int approximate, int dtype,
                      void* context) {
#if defined(__AVX512F__)
  if (dtype == GPTLITE_BF16 && has_avx512_bf16() && avx512_bf16::bias_gelu_forward) {
    return avx512_bf16::bias_gelu_forward(y, x, bias, rows, width, approximate, dtype, context);
  }
#endif
  return with_dtype(dtype, [&](auto element) {
    return bias_gelu_forward_of<decltype(element)>(y, x, bias, rows, width, approximate, context);
  });
}

int bias_gelu_backward(void* dx, void* dbias, float* workspace, const void* dy, const void* x, const void* bias,
                       int64_t rows, int64_t width, int approximate, int dtype, void* context) {
#if defined(__AVX512F__)
  if (dtype == GPTLITE_BF16 && has_avx512_bf16() && avx512_bf16::bias_gelu_backward) {
    return avx512_bf16::bias_gelu_backward(dx, dbias, workspace, dy, x, bias, rows, width, approximate, dtype, context);
  }
#endif
  return with_dtype(dtype, [&](auto element) {
    return bias_gelu_backward_of<decltype(element)>(dx, dbias, workspace, dy, x, bias, rows, width, approximate,
                                                    context);
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
