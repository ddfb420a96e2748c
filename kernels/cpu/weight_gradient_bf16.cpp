// Weight and bias gradients of a linear layer in bf16 (weight_gradient.h), with dot products of bf16 (pair_dots.h),
// for CPUs without AMX.
#include "pair_dots.h"
#include "weight_gradient.h"

namespace gptlite {
namespace GPTLITE_ISA {

int weight_gradient(void* dw, void* dbias, const void* dy, const void* x, int64_t rows, int64_t outputs, int64_t inputs,
                    int dtype, int out_dtype, int64_t threads, void* context) {
  return weight_gradient_by_blocks<PairDots>(dw, dbias, dy, x, rows, outputs, inputs, dtype, out_dtype, threads, context);
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
