// Cross entropy of logits. They become their gradient, unless there is a tensor of bytes for a gradient in e5m2.
#include "common.h"

namespace gptlite::binding {
namespace {

// Checked sizes of logits [rows, columns], and their targets. Rows are contiguous, with possible gaps between them.
struct Logits {
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int dtype;
  Tensor targets;

  Logits(const Tensor& logits, const Tensor& given)
      : dtype(float_dtype(logits, "logits")), targets(as_contiguous(given)) {
    STD_TORCH_CHECK(logits.dim() == 2, "logits must be [rows, columns], not ", text(sizes_of(logits)));
    rows = logits.size(0);
    columns = logits.size(1);
    row_stride = rows > 1 ? logits.stride(0) : columns;
    STD_TORCH_CHECK((columns <= 1 || logits.stride(1) == 1) && row_stride >= columns,
                    "the rows of logits must be contiguous and apart");
    check_device(given, "targets", logits);
    check_int64(given, "targets");
    check_sizes(given, "targets", {rows});
  }
};

bool starts_at_multiples(const void* data, int64_t stride, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride % bytes == 0;
}

// Returns the loss with the memory for its gradient.
GptliteLoss with_gradient(GptliteLoss loss, const Tensor& logits, const Logits& size, const OptionalTensor& gradient) {
  if (!gradient) return loss;
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(gradient->get(), &dtype));
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_uint8() && size.dtype == GPTLITE_BF16,
                  "a gradient in e5m2 must be of uint8, and its logits of bf16");
  check_device(*gradient, "gradient", logits);
  check_sizes(*gradient, "gradient", {size.rows, size.columns});
  loss.gradient = static_cast<uint8_t*>(mutable_data(*gradient));
  loss.gradient_stride = size.rows > 1 ? gradient->stride(0) : 0;
  STD_TORCH_CHECK((size.columns <= 1 || gradient->stride(1) == 1) && starts_at_multiples(data(logits), 0, 16) &&
                      (size.rows <= 1 || (loss.gradient_stride >= size.columns && size.row_stride % 8 == 0)) &&
                      starts_at_multiples(loss.gradient, loss.gradient_stride, 8),
                  "with a gradient in e5m2, rows of logits must start at multiples of 16 bytes, and contiguous rows of "
                  "the gradient at multiples of 8");
  return loss;
}

Tensor cross_entropy_(const Tensor& logits, const Tensor& targets, double z_loss, int64_t ignore_index,
                      bool want_gradient, double scale, const OptionalTensor& gradient) {
  const Logits size(logits, targets);
  const GptliteLoss loss = with_gradient({ignore_index, 0, float(z_loss), float(scale)}, logits, size, gradient);
  const Tensor losses = empty({size.rows}, GPTLITE_FP32, logits);
  GPTLITE_CALL(logits, cross_entropy, mutable_floats(losses), mutable_data(logits), size.row_stride,
               integers(size.targets), size.rows, size.columns, &loss, int(want_gradient), size.dtype);
  return losses;
}

Tensor cross_entropy_stats(const Tensor& logits, const Tensor& targets, int64_t first, int64_t ignore_index) {
  const Logits size(logits, targets);
  const GptliteLoss loss{ignore_index, first, 0, 1, nullptr, 0};
  const Tensor stats = empty({size.rows, 2}, GPTLITE_FP32, logits);
  GPTLITE_CALL(logits, cross_entropy_stats, mutable_floats(stats), data(logits), size.row_stride,
               integers(size.targets), size.rows, size.columns, &loss, size.dtype);
  return stats;
}

void cross_entropy_gradient_(const Tensor& logits, const Tensor& targets, const Tensor& log_sum, int64_t first,
                             double z_loss, int64_t ignore_index, double scale, const OptionalTensor& gradient) {
  const Logits size(logits, targets);
  check_device(log_sum, "log_sum", logits);
  check_fp32(log_sum, "log_sum");
  check_sizes(log_sum, "log_sum", {size.rows});
  const Tensor sums = as_contiguous(log_sum);
  const GptliteLoss loss = with_gradient({ignore_index, first, float(z_loss), float(scale)}, logits, size, gradient);
  GPTLITE_CALL(logits, cross_entropy_gradient, mutable_data(logits), size.row_stride, integers(size.targets),
               floats(sums), size.rows, size.columns, &loss, size.dtype);
}

GPTLITE_OPS(m) {
  m.impl("cross_entropy_", TORCH_BOX(&cross_entropy_));
  m.impl("cross_entropy_stats", TORCH_BOX(&cross_entropy_stats));
  m.impl("cross_entropy_gradient_", TORCH_BOX(&cross_entropy_gradient_));
}

}  // namespace
}  // namespace gptlite::binding
