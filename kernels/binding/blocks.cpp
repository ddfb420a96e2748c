// Blockwise quantization, and that of a matrix to fp8.
#include "common.h"

namespace gptlite::binding {
namespace {

int64_t width_of(int64_t bits) {
  STD_TORCH_CHECK(bits == 8 || bits == 4 || bits == 1, "bits must be 8, 4 or 1, not ", bits);
  return bits == 1 ? 1024 : 256;
}

int64_t message_bytes(int64_t blocks, int64_t bits) { return blocks * (4 + width_of(bits) * bits / 8); }

// Returns the mask of x [blocks, width], contiguous.
OptionalTensor mask_of(const OptionalTensor& mask, const Sizes& sizes, const Tensor& like) {
  if (!mask) return std::nullopt;
  check_device(*mask, "mask", like);
  STD_TORCH_CHECK(dtype_of(*mask) == GPTLITE_BOOL, "mask must be of bool");
  check_sizes(*mask, "mask", sizes);
  return as_contiguous(*mask);
}

Tensor new_bytes(const Sizes& sizes, const Tensor& like) {
  int32_t device;
  AtenTensorHandle handle;
  const Sizes strides = sizes.size() == 2 ? Sizes{sizes[1], 1} : Sizes{1};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(),
                                                  aoti_torch_dtype_uint8(), device, like.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor quantize_blocks(const Tensor& x, const OptionalTensor& mask, int64_t bits) {
  check_fp32(x, "x");
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == width_of(bits), "x must be [blocks, ", width_of(bits), "], not ",
                  text(sizes_of(x)));
  const int64_t blocks = x.size(0);
  const Tensor input = as_contiguous(x), message = new_bytes({message_bytes(blocks, bits)}, x);
  const OptionalTensor kept = mask_of(mask, sizes_of(x), x);
  GPTLITE_CALL(x, quantize_blocks, mutable_data(message), floats(input), data(kept), blocks, int(bits));
  return message;
}

Tensor dequantize_blocks(const Tensor& message, const OptionalTensor& mask, int64_t blocks, int64_t bits) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(message.get(), &dtype));
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_uint8(), "message must be of uint8");
  check_sizes(message, "message", {message_bytes(blocks, bits)});
  const Sizes sizes{blocks, width_of(bits)};
  const Tensor input = as_contiguous(message), x = empty(sizes, GPTLITE_FP32, message);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data(input)) % sizeof(float) == 0, "message must be aligned to 4 bytes");
  const OptionalTensor kept = mask_of(mask, sizes, message);
  GPTLITE_CALL(message, dequantize_blocks, mutable_floats(x), data(input), data(kept), blocks, int(bits));
  return x;
}

std::tuple<Tensor, Tensor, Tensor> quantize_fp8(const Tensor& x, const Tensor& amax, bool e5m2, bool both) {
  const int dtype = float_dtype(x, "x");
  STD_TORCH_CHECK(x.dim() == 2 && x.numel() > 0, "x must be a matrix with elements, not ", text(sizes_of(x)));
  check_device(amax, "amax", x);
  check_fp32(amax, "amax");
  check_sizes(amax, "amax", {});
  const int64_t rows = x.size(0), width = x.size(1);
  const Tensor input = as_contiguous(x), y = new_bytes({rows, width}, x), scale = empty({}, GPTLITE_FP32, x);
  const Tensor transposed = new_bytes(both ? Sizes{width, rows} : Sizes{0}, x);
  GPTLITE_CALL(x, quantize_fp8, mutable_data(y), both ? mutable_data(transposed) : nullptr, mutable_floats(scale),
               data(input), floats(amax), rows, width, int(e5m2), dtype);
  return {y, transposed, scale};
}

GPTLITE_OPS(m) {
  m.impl("quantize_fp8", TORCH_BOX(&quantize_fp8));
  m.impl("quantize_blocks", TORCH_BOX(&quantize_blocks));
  m.impl("dequantize_blocks", TORCH_BOX(&dequantize_blocks));
}

}  // namespace
}  // namespace gptlite::binding
