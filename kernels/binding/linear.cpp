// Gradients of a linear layer's parameters, on CPUs that multiply bf16.
#include "common.h"

namespace gptlite::binding {
namespace {

std::tuple<Tensor, Tensor> weight_gradient(const Tensor& dy, const Tensor& x, bool bias, bool fp32) {
  const Rows outputs(dy, "dy"), inputs(x, "x");
  const int dtype = float_dtype(dy, "dy"), out_dtype = fp32 ? GPTLITE_FP32 : dtype;
  check_dtype(x, "x", dtype, "dy");
  STD_TORCH_CHECK(outputs.leading == inputs.leading, "dy and x must have the same rows, not ", text(outputs.leading),
                  " and ", text(inputs.leading));
  const Tensor from = as_contiguous(dy), with = as_contiguous(x);
  const Tensor dw = empty({outputs.width, inputs.width}, out_dtype, x);
  const Tensor dbias = empty({bias ? outputs.width : 0}, out_dtype, x);
  check_cpu(gptlite_cpu_weight_gradient(mutable_data(dw), bias ? mutable_data(dbias) : nullptr, data(from), data(with),
                                        outputs.rows, outputs.width, inputs.width, dtype, out_dtype,
                                        int64_t(torch::stable::get_num_threads()), cpu_context()),
            "weight_gradient");
  return {dw, dbias};
}

STABLE_TORCH_LIBRARY_IMPL(gptlite, CPU, m) { m.impl("weight_gradient", TORCH_BOX(&weight_gradient)); }

}  // namespace
}  // namespace gptlite::binding
