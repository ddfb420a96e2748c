// Activation of x + bias (bias_activation.h) for bf16. These CPUs round to bf16 by one instruction instead of six.
#include "bias_activation.h"

namespace gptlite {
namespace GPTLITE_ISA {

int bias_activation_forward(void* y, const void* x, const void* bias, int64_t rows, int64_t width, int kind, int dtype, float* amax,
                            void* context) {
  if (dtype != GPTLITE_BF16) return GPTLITE_UNSUPPORTED;
  return bias_activation_forward_of<Bf16>(y, x, bias, rows, width, kind, amax, context);
}

int bias_activation_backward(void* dx, void* dbias, float* workspace, const void* dy, const void* x, const void* bias,
                             int64_t rows, int64_t width, int kind, int dtype, float* amax, void* context) {
  if (dtype != GPTLITE_BF16) return GPTLITE_UNSUPPORTED;
  return bias_activation_backward_of<Bf16>(dx, dbias, workspace, dy, x, bias, rows, width, kind, amax, context);
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
