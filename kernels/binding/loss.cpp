// Cross entropy of logits, in place: the logits become their gradient.
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

Tensor cross_entropy_(const Tensor& logits, const Tensor& targets, double z_loss, int64_t ignore_index,
                      bool want_gradient, double scale) {
  const Logits size(logits, targets);
  const GptliteLoss loss{ignore_index, 0, float(z_loss), float(scale)};
  const Tensor losses = empty({size.rows}, GPTLITE_FP32, logits);
  GPTLITE_CALL(logits, cross_entropy, mutable_floats(losses), mutable_data(logits), size.row_stride,
               integers(size.targets), size.rows, size.columns, &loss, int(want_gradient), size.dtype);
  return losses;
}

Tensor cross_entropy_stats(const Tensor& logits, const Tensor& targets, int64_t first, int64_t ignore_index) {
  const Logits size(logits, targets);
  const GptliteLoss loss{ignore_index, first, 0, 1};
  const Tensor stats = empty({size.rows, 2}, GPTLITE_FP32, logits);
  GPTLITE_CALL(logits, cross_entropy_stats, mutable_floats(stats), data(logits), size.row_stride,
               integers(size.targets), size.rows, size.columns, &loss, size.dtype);
  return stats;
}

void cross_entropy_gradient_(const Tensor& logits, const Tensor& targets, const Tensor& log_sum, int64_t first,
                             double z_loss, int64_t ignore_index, double scale) {
  const Logits size(logits, targets);
  check_device(log_sum, "log_sum", logits);
  check_fp32(log_sum, "log_sum");
  check_sizes(log_sum, "log_sum", {size.rows});
  const Tensor sums = as_contiguous(log_sum);
  const GptliteLoss loss{ignore_index, first, float(z_loss), float(scale)};
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
