// Code shared by all ops: checks of arguments, new tensors, and the call of a kernel on the tensors' device. Only
// torch's stable ABI is used, so that the library runs with every later version of torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "gptlite_kernels.h"

#ifdef USE_CUDA
#pragma weak aoti_torch_get_current_cuda_stream  // NULL in a torch without CUDA, which can load the library too
extern "C" const char* cudaGetErrorString(int error);
#endif

namespace gptlite::binding {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

// Returns GPTLITE_FP32 etc., or GPTLITE_NONE for a dtype that no kernel takes.
inline int dtype_of(const Tensor& tensor) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  if (dtype == aoti_torch_dtype_float32()) return GPTLITE_FP32;
  if (dtype == aoti_torch_dtype_bfloat16()) return GPTLITE_BF16;
  if (dtype == aoti_torch_dtype_float16()) return GPTLITE_FP16;
  if (dtype == aoti_torch_dtype_bool()) return GPTLITE_BOOL;
  return GPTLITE_NONE;
}

inline int float_dtype(const Tensor& tensor, const char* name) {
  const int dtype = dtype_of(tensor);
  STD_TORCH_CHECK(dtype != GPTLITE_NONE && dtype != GPTLITE_BOOL, name, " must be of float32, bfloat16 or float16");
  return dtype;
}

inline void check_dtype(const Tensor& tensor, const char* name, int dtype, const char* like) {
  STD_TORCH_CHECK(dtype_of(tensor) == dtype, name, " must be of the dtype of ", like);
}

inline void check_fp32(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(dtype_of(tensor) == GPTLITE_FP32, name, " must be of float32");
}

inline void check_fp64(const Tensor& tensor, const char* name) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_float64(), name, " must be of float64");
}

inline void check_int64(const Tensor& tensor, const char* name) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_int64(), name, " must be of int64");
}

inline Sizes sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

inline std::string text(const Sizes& sizes) {
  std::string result = "[";
  for (size_t i = 0; i < sizes.size(); ++i) result += (i ? ", " : "") + std::to_string(sizes[i]);
  return result + "]";
}

inline void check_sizes(const Tensor& tensor, const char* name, const Sizes& sizes) {
  const Sizes found = sizes_of(tensor);
  STD_TORCH_CHECK(found == sizes, name, " must be ", text(sizes), ", not ", text(found));
}

inline void check_device(const Tensor& tensor, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() == like.is_cuda() && tensor.is_cpu() == like.is_cpu() &&
                      tensor.get_device_index() == like.get_device_index(),
                  name, " is on another device than the first tensor");
}

// Returns the tensor, copied if it is not contiguous.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// The same, after a check that device, dtype and sizes are those of `like`.
inline Tensor contiguous_like(const Tensor& tensor, const char* name, const Tensor& like, const char* like_name) {
  check_device(tensor, name, like);
  check_dtype(tensor, name, dtype_of(like), like_name);
  check_sizes(tensor, name, sizes_of(like));
  return as_contiguous(tensor);
}

inline void check_in_place(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " is changed in place and must be contiguous");
}

inline int32_t torch_dtype(int dtype) {
  return dtype == GPTLITE_FP32 ? aoti_torch_dtype_float32()
         : dtype == GPTLITE_BF16 ? aoti_torch_dtype_bfloat16()
                                 : aoti_torch_dtype_float16();
}

inline Tensor empty_strided(const Sizes& sizes, const Sizes& strides, int dtype, const Tensor& like) {
  int32_t device;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(),
                                                         torch_dtype(dtype), device, like.get_device_index(), &handle));
  return Tensor(handle);
}

// Returns a contiguous tensor on the device of `like`.
inline Tensor empty(const Sizes& sizes, int dtype, const Tensor& like) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i] > 0 ? sizes[i] : 1) strides[i] = stride;
  return empty_strided(sizes, strides, dtype, like);
}

inline Tensor new_like(const Tensor& like) { return empty(sizes_of(like), dtype_of(like), like); }

// Number of rows and width of a tensor whose last dim is a row.
struct Rows {
  int64_t rows = 1;
  int64_t width = 1;
  Sizes leading;  // all sizes but the width

  Rows(const Tensor& tensor, const char* name) {
    STD_TORCH_CHECK(tensor.dim() >= 1, name, " must have a dim at least");
    leading = sizes_of(tensor);
    width = leading.back();
    leading.pop_back();
    for (const int64_t size : leading) rows *= size;
  }
};

inline const void* data(const Tensor& tensor) { return tensor.const_data_ptr(); }
inline const void* data(const OptionalTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
inline void* mutable_data(const Tensor& tensor) { return tensor.mutable_data_ptr(); }
inline const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }
inline const float* floats(const OptionalTensor& tensor) { return tensor ? floats(*tensor) : nullptr; }
inline float* mutable_floats(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }
inline const int64_t* integers(const Tensor& tensor) { return static_cast<const int64_t*>(tensor.const_data_ptr()); }

// Runs a kernel's tasks on torch's threads.
inline void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(void*, int64_t, int64_t), void* state) {
  torch::stable::parallel_for(begin, end, grain,
                              [body, state](int64_t first, int64_t last) { body(state, first, last); });
}

inline void* cpu_context() {
  static GptliteThreads threads{parallel_for};
  return &threads;
}

#ifdef USE_CUDA
inline bool knows_stream() { return aoti_torch_get_current_cuda_stream != nullptr; }

inline void* current_stream(int32_t device) {
  STD_TORCH_CHECK(knows_stream(), "this torch does not have aoti_torch_get_current_cuda_stream: no CUDA kernel can run");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

// Makes the tensor's device the current one during its lifetime, and holds the device's current stream.
class CudaContext {
 public:
  explicit CudaContext(const Tensor& tensor)
      : guard_(tensor.get_device_index()), stream_(current_stream(tensor.get_device_index())) {}
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
};

inline void check_cuda(int error, const char* kernel) {
  STD_TORCH_CHECK(error == 0, kernel, ": ", cudaGetErrorString(error));
}
#endif

inline void check_cpu(int error, const char* kernel) {
  STD_TORCH_CHECK(error == 0, kernel, " does not take these arguments on a CPU: error ", error);
}

}  // namespace gptlite::binding

// Calls a kernel on the device of the tensor `like`, and appends the context to the arguments. Raises on an error.
#ifdef USE_CUDA
#define GPTLITE_CALL(like, kernel, ...)                                                                        \
  ((like).is_cuda()                                                                                            \
       ? check_cuda(gptlite_cuda_##kernel(__VA_ARGS__, CudaContext(like).stream()), #kernel)                   \
       : check_cpu(gptlite_cpu_##kernel(__VA_ARGS__, cpu_context()), #kernel))
// Registers ops for each type of device: `GPTLITE_OPS(m) { m.impl(...); }`.
#define GPTLITE_OPS(m)                                                   \
  static void register_ops(torch::stable::detail::StableLibrary& m);     \
  STABLE_TORCH_LIBRARY_IMPL(gptlite, CPU, cpu) { register_ops(cpu); }    \
  STABLE_TORCH_LIBRARY_IMPL(gptlite, CUDA, cuda) { register_ops(cuda); } \
  static void register_ops(torch::stable::detail::StableLibrary& m)
#else
#define GPTLITE_CALL(like, kernel, ...) check_cpu(gptlite_cpu_##kernel(__VA_ARGS__, cpu_context()), #kernel)
#define GPTLITE_OPS(m)                                                \
  static void register_ops(torch::stable::detail::StableLibrary& m);  \
  STABLE_TORCH_LIBRARY_IMPL(gptlite, CPU, cpu) { register_ops(cpu); } \
  static void register_ops(torch::stable::detail::StableLibrary& m)
#endif
