// Norm of many tensors, and AdamW on many tensors. The kernel is called once for each dtype of the gradients.
#include "common.h"

namespace gptlite::binding {
namespace {

constexpr int kDtypes[] = {GPTLITE_FP32, GPTLITE_BF16, GPTLITE_FP16};

// Writes the norm of contiguous tensors of a single dtype to `*out`.
void norm_into(float* out, const std::vector<Tensor>& tensors, int dtype) {
  std::vector<const void*> pointers;
  std::vector<int64_t> counts;
  int64_t total = 0;
  for (const Tensor& tensor : tensors) {
    pointers.push_back(data(tensor));
    counts.push_back(tensor.numel());
    total += counts.back();
  }
  const Tensor& first = tensors.front();
  const Tensor workspace = empty({gptlite_norm_workspace(total, int64_t(counts.size()))}, GPTLITE_FP32, first);
  GPTLITE_CALL(first, norm, out, mutable_floats(workspace), pointers.data(), counts.data(), int64_t(counts.size()),
               dtype);
}

Tensor norm(const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "norm needs a tensor at least");
  std::vector<std::vector<Tensor>> groups(3);
  for (const Tensor& tensor : tensors) {
    check_device(tensor, "each tensor", tensors.front());
    groups[float_dtype(tensor, "each tensor")].push_back(as_contiguous(tensor));
  }
  const Tensor norms = empty({3}, GPTLITE_FP32, tensors.front()), whole = empty({}, GPTLITE_FP32, tensors.front());
  int64_t used = 0;
  for (const int dtype : kDtypes)
    if (groups[dtype].size() == tensors.size()) {
      norm_into(mutable_floats(whole), groups[dtype], dtype);
      return whole;
    } else if (!groups[dtype].empty()) {
      norm_into(mutable_floats(norms) + used++, groups[dtype], dtype);
    }
  // The norm of the norms is the norm of all tensors.
  Tensor several = norms;
  norm_into(mutable_floats(whole), {torch::stable::narrow(several, 0, 0, used)}, GPTLITE_FP32);
  return whole;
}

void check_state(const Tensor& tensor, const char* name, const Tensor& parameter) {
  check_device(tensor, name, parameter);
  check_fp32(tensor, name);
  check_in_place(tensor, name);
}

void check_flag(const OptionalTensor& flag, const char* name, const Tensor& like) {
  if (!flag) return;
  check_device(*flag, name, like);
  check_fp32(*flag, name);
  STD_TORCH_CHECK(flag->numel() == 1, name, " must be one number, not ", text(sizes_of(*flag)));
}

void check_copy(const Tensor& copy, const Tensor& parameter) {
  check_device(copy, "each of copies", parameter);
  check_in_place(copy, "each of copies");
  check_sizes(copy, "each of copies", sizes_of(parameter));
  STD_TORCH_CHECK(float_dtype(copy, "each of copies") != GPTLITE_FP32, "each of copies must be bf16 or fp16");
}

void adamw_(const std::vector<Tensor>& parameters, const std::vector<Tensor>& gradients,
            const std::vector<Tensor>& exp_avg, const std::vector<Tensor>& exp_avg_sq, const std::vector<Tensor>& steps,
            double lr, double beta1, double beta2, double eps, double weight_decay, bool adam,
            const OptionalTensor& scale, const OptionalTensor& found_inf,
            const std::optional<std::vector<Tensor>>& copies, const OptionalTensor& rate) {
  const size_t count = parameters.size();
  STD_TORCH_CHECK(!copies || copies->size() == count, "copies must be as many as parameters, or none");
  STD_TORCH_CHECK(gradients.size() == count && exp_avg.size() == count && exp_avg_sq.size() == count &&
                      steps.size() == count,
                  "parameters, gradients, exp_avg, exp_avg_sq and steps must be as many");
  if (count == 0) return;
  const Tensor& first = parameters.front();
  check_flag(scale, "scale", first);
  check_flag(found_inf, "found_inf", first);
  if (rate) {
    check_device(*rate, "rate", first);
    check_fp64(*rate, "rate");
    STD_TORCH_CHECK(rate->numel() == 1, "rate must be one number, not ", text(sizes_of(*rate)));
  }
  std::vector<std::vector<GptliteAdam>> groups(3);
  std::vector<Tensor> whole;  // copies of gradients, alive until the kernel has read them
  for (size_t i = 0; i < count; ++i) {
    const Tensor& parameter = parameters[i];
    check_device(parameter, "each parameter", first);
    check_state(parameter, "each parameter", parameter);
    check_state(exp_avg[i], "exp_avg", parameter);
    check_state(exp_avg_sq[i], "exp_avg_sq", parameter);
    check_state(steps[i], "each of steps", parameter);
    check_device(gradients[i], "each gradient", parameter);
    const Sizes sizes = sizes_of(parameter);
    check_sizes(gradients[i], "the gradient", sizes);
    check_sizes(exp_avg[i], "exp_avg", sizes);
    check_sizes(exp_avg_sq[i], "exp_avg_sq", sizes);
    STD_TORCH_CHECK(steps[i].numel() == 1, "each of steps must be one number, not ", text(sizes_of(steps[i])));
    const int dtype = float_dtype(gradients[i], "each gradient");
    whole.push_back(as_contiguous(gradients[i]));
    groups[dtype].push_back({mutable_floats(parameter), data(whole.back()), mutable_floats(exp_avg[i]),
                             mutable_floats(exp_avg_sq[i]), mutable_floats(steps[i]), parameter.numel(), nullptr,
                             GPTLITE_BF16});
    if (!copies || (*copies)[i].numel() == 0) continue;
    const Tensor& copy = (*copies)[i];
    check_copy(copy, parameter);
    groups[dtype].back().copy = mutable_data(copy);
    groups[dtype].back().copy_dtype = float_dtype(copy, "each of copies");
  }
  for (const int dtype : kDtypes)
    if (!groups[dtype].empty())
      GPTLITE_CALL(first, adamw, groups[dtype].data(), int64_t(groups[dtype].size()), lr, beta1, beta2, eps,
                   weight_decay, int(adam), floats(scale), floats(found_inf),
                   rate ? static_cast<const double*>(rate->const_data_ptr()) : nullptr, dtype);
}

GPTLITE_OPS(m) {
  m.impl("norm", TORCH_BOX(&norm));
  m.impl("adamw_", TORCH_BOX(&adamw_));
}

}  // namespace
}  // namespace gptlite::binding
