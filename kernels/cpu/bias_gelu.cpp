// GELU of a sum of rows and a bias, of any dtype.
#include "bias_gelu.h"

namespace gptlite {
namespace GPTLITE_ISA {

int bias_gelu_forward(void* y, const void* x, const void* bias, int64_t rows, int64_t width, int approximate, int dtype,
                      void* context) {
  return with_dtype(dtype, [&](auto element) {
    return bias_gelu_forward_of<decltype(element)>(y, x, bias, rows, width, approximate, context);
  });
}

int bias_gelu_backward(void* dx, void* dbias, float* workspace, const void* dy, const void* x, const void* bias,
                       int64_t rows, int64_t width, int approximate, int dtype, void* context) {
  return with_dtype(dtype, [&](auto element) {
    return bias_gelu_backward_of<decltype(element)>(dx, dbias, workspace, dy, x, bias, rows, width, approximate,
                                                    context);
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
