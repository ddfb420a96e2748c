// Weight and bias gradients of a linear layer in bf16 (weight_gradient.h), with AMX.
#include "tiles_amx.h"
#include "weight_gradient.h"

namespace gptlite {
namespace amx {

int weight_gradient(void* dw, void* dbias, const void* dy, const void* x, int64_t rows, int64_t outputs, int64_t inputs,
                    int dtype, int out_dtype, int64_t threads, void* context) {
  return weight_gradient_by_blocks<Tiles>(dw, dbias, dy, x, rows, outputs, inputs, dtype, out_dtype, threads, context);
}

}  // namespace amx
}  // namespace gptlite
