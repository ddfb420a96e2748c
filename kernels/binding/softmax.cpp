// Masked and causal softmax. Functional ops pass a new result tensor to `*_into`, ops in place pass their input.
#include "common.h"

namespace gptlite::binding {
namespace {

// Writes the mask's strides along the four dims of x, 0 for a dim along which the mask is broadcast.
void broadcast_strides(const Tensor& mask, const Sizes& x, int64_t* strides) {
  const Sizes sizes = sizes_of(mask);
  const int64_t skipped = 4 - int64_t(sizes.size());
  STD_TORCH_CHECK(skipped >= 0, "mask must have 4 dims at most, not ", sizes.size());
  for (int64_t dim = 0; dim < 4; ++dim) {
    const int64_t size = dim < skipped ? 1 : sizes[dim - skipped];
    STD_TORCH_CHECK(size == 1 || size == x[dim], "mask ", text(sizes), " does not broadcast to x ", text(x));
    strides[dim] = size == 1 ? 0 : mask.stride(dim - skipped);
  }
}

void masked_into(const Tensor& y, const Tensor& x, const OptionalTensor& mask, double scale) {
  const int dtype = float_dtype(x, "x");
  STD_TORCH_CHECK(x.dim() == 4, "x must be [batch, heads, queries, keys], not ", text(sizes_of(x)));
  const Sizes sizes = sizes_of(x);
  int64_t strides[4] = {0, 0, 0, 0};
  int mask_dtype = GPTLITE_NONE;
  if (mask) {
    check_device(*mask, "mask", x);
    mask_dtype = dtype_of(*mask);
    STD_TORCH_CHECK(mask_dtype != GPTLITE_NONE, "mask must be of bool, float32, bfloat16 or float16");
    broadcast_strides(*mask, sizes, strides);
  }
  GPTLITE_CALL(x, masked_softmax_forward, mutable_data(y), data(x), data(mask), mask_dtype, strides, sizes[0], sizes[1],
               sizes[2], sizes[3], float(scale), dtype);
}

void masked_backward_into(const Tensor& dx, const Tensor& dy, const Tensor& y, double scale) {
  const int dtype = float_dtype(dy, "dy");
  const Tensor whole = contiguous_like(y, "y", dy, "dy");
  const Rows size(dy, "dy");
  GPTLITE_CALL(dy, masked_softmax_backward, mutable_data(dx), data(dy), data(whole), size.rows, size.width, float(scale),
               dtype);
}

// Sizes of x as a batch of matrices [queries, keys].
struct Matrices {
  int64_t matrices = 1;
  int64_t queries;
  int64_t keys;

  Matrices(const Tensor& x, const char* name) {
    const Sizes sizes = sizes_of(x);
    STD_TORCH_CHECK(sizes.size() >= 2, name, " must be [..., queries, keys], not ", text(sizes));
    queries = sizes[sizes.size() - 2];
    keys = sizes.back();
    for (size_t dim = 0; dim + 2 < sizes.size(); ++dim) matrices *= sizes[dim];
  }
};

void causal_into(const Tensor& y, const Tensor& x, double scale) {
  const int dtype = float_dtype(x, "x");
  const Matrices size(x, "x");
  GPTLITE_CALL(x, causal_softmax_forward, mutable_data(y), data(x), size.matrices, size.queries, size.keys, float(scale),
               dtype);
}

void causal_backward_into(const Tensor& dx, const Tensor& dy, const Tensor& y, double scale) {
  const int dtype = float_dtype(dy, "dy");
  const Tensor whole = contiguous_like(y, "y", dy, "dy");
  const Matrices size(dy, "dy");
  GPTLITE_CALL(dy, causal_softmax_backward, mutable_data(dx), data(dy), data(whole), size.matrices, size.queries,
               size.keys, float(scale), dtype);
}

Tensor masked_softmax(const Tensor& x, const OptionalTensor& mask, double scale) {
  float_dtype(x, "x");
  const Tensor whole = as_contiguous(x), y = new_like(x);
  masked_into(y, whole, mask, scale);
  return y;
}

void masked_softmax_(const Tensor& x, const OptionalTensor& mask, double scale) {
  check_in_place(x, "x");
  masked_into(x, x, mask, scale);
}

Tensor masked_softmax_backward(const Tensor& dy, const Tensor& y, double scale) {
  float_dtype(dy, "dy");
  const Tensor whole = as_contiguous(dy), dx = new_like(dy);
  masked_backward_into(dx, whole, y, scale);
  return dx;
}

void masked_softmax_backward_(const Tensor& dy, const Tensor& y, double scale) {
  check_in_place(dy, "dy");
  masked_backward_into(dy, dy, y, scale);
}

Tensor causal_softmax(const Tensor& x, double scale) {
  float_dtype(x, "x");
  const Tensor whole = as_contiguous(x), y = new_like(x);
  causal_into(y, whole, scale);
  return y;
}

void causal_softmax_(const Tensor& x, double scale) {
  check_in_place(x, "x");
  causal_into(x, x, scale);
}

Tensor causal_softmax_backward(const Tensor& dy, const Tensor& y, double scale) {
  float_dtype(dy, "dy");
  const Tensor whole = as_contiguous(dy), dx = new_like(dy);
  causal_backward_into(dx, whole, y, scale);
  return dx;
}

void causal_softmax_backward_(const Tensor& dy, const Tensor& y, double scale) {
  check_in_place(dy, "dy");
  causal_backward_into(dy, dy, y, scale);
}

GPTLITE_OPS(m) {
  m.impl("masked_softmax", TORCH_BOX(&masked_softmax));
  m.impl("masked_softmax_", TORCH_BOX(&masked_softmax_));
  m.impl("masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
  m.impl("masked_softmax_backward_", TORCH_BOX(&masked_softmax_backward_));
  m.impl("causal_softmax", TORCH_BOX(&causal_softmax));
  m.impl("causal_softmax_", TORCH_BOX(&causal_softmax_));
  m.impl("causal_softmax_backward", TORCH_BOX(&causal_softmax_backward));
  m.impl("causal_softmax_backward_", TORCH_BOX(&causal_softmax_backward_));
}

}  // namespace
}  // namespace gptlite::binding
