// Causal attention on CPUs: of separate q, k and v in any layout, or of the packed qkv that a single projection
// returns.
#include "common.h"

namespace gptlite::binding {
namespace {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// Returns the tensor [batch, heads, positions, width], copied if its rows are not contiguous.
Tensor with_rows(const Tensor& tensor) {
  return tensor.size(3) <= 1 || tensor.stride(3) == 1 ? tensor : torch::stable::contiguous(tensor);
}

GptliteHeads heads_of(const Tensor& tensor, void* data) {
  return {data, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

GptliteHeads reading(const Tensor& tensor) { return heads_of(tensor, const_cast<void*>(data(tensor))); }
GptliteHeads writing(const Tensor& tensor) { return heads_of(tensor, mutable_data(tensor)); }

// Returns part 0, 1 or 2 (q, k or v) of a tensor [batch, positions, heads, 3, width] at `data`.
GptliteHeads part(const Tensor& packed, void* data, int index) {
  const int64_t bytes = int64_t(packed.element_size());
  return {static_cast<char*>(data) + index * packed.stride(3) * bytes, packed.stride(0), packed.stride(2),
          packed.stride(1)};
}

// Describes a tensor [batch, positions, heads, width] as the [batch, heads, positions, width] that the kernels take.
GptliteHeads by_position(const Tensor& tensor, void* data) {
  return {data, tensor.stride(0), tensor.stride(2), tensor.stride(1)};
}

struct Size {
  int64_t batch, heads, queries, keys, width;
  int dtype;

  Size(const Tensor& q, const Tensor& k, const Tensor& v) : dtype(float_dtype(q, "q")) {
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "q and k must be [batch, heads, positions, width]");
    batch = q.size(0), heads = q.size(1), queries = q.size(2), keys = k.size(2), width = q.size(3);
    STD_TORCH_CHECK(queries <= keys, "there must be as many keys as queries (", queries, ") at least, not ", keys);
    for (const auto& [tensor, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
      check_dtype(*tensor, name, dtype, "q");
      check_sizes(*tensor, name, {batch, heads, keys, width});
    }
  }

  explicit Size(const Tensor& qkv) : dtype(float_dtype(qkv, "qkv")) {
    STD_TORCH_CHECK(qkv.dim() == 5 && qkv.size(3) == 3, "qkv must be [batch, positions, heads, 3, width], not ",
                    text(sizes_of(qkv)));
    batch = qkv.size(0), heads = qkv.size(2), queries = keys = qkv.size(1), width = qkv.size(4);
  }
};

// Returns the number of keys that a query sees. For 0, which stands for all, it exceeds that of any padded position.
int64_t windowed(int64_t window) {
  STD_TORCH_CHECK(window >= 0, "window must be at least 0, not ", window);
  return window ? window : INT64_MAX / 2;
}

Tensor checked_lse(const Tensor& lse, const Size& size) {
  check_fp32(lse, "lse");
  check_sizes(lse, "lse", {size.batch, size.heads, size.queries});
  return as_contiguous(lse);
}

Tensor checked(const Tensor& tensor, const char* name, const Size& size, const Sizes& sizes) {
  check_dtype(tensor, name, size.dtype, "q");
  check_sizes(tensor, name, sizes);
  return with_rows(tensor);
}

// Returns an empty tensor [batch, heads, positions, width] with the memory layout [batch, positions, heads, width], so
// that the projection after attention needs no copy.
Tensor new_heads(const Size& size, int64_t positions, const Tensor& like) {
  const int64_t row = size.heads * size.width;
  return empty_strided({size.batch, size.heads, positions, size.width}, {positions * row, size.width, row, 1},
                       size.dtype, like);
}

Two attention(const Tensor& q, const Tensor& k, const Tensor& v, double scale, int64_t window) {
  const Size size(q, k, v);
  const Tensor queries = with_rows(q), keys = with_rows(k), values = with_rows(v);
  const Tensor out = new_heads(size, size.queries, q);
  const Tensor lse = empty({size.batch, size.heads, size.queries}, GPTLITE_FP32, q);
  const GptliteHeads to = writing(out), from_q = reading(queries), from_k = reading(keys), from_v = reading(values);
  check_cpu(gptlite_cpu_attention_forward(&to, mutable_floats(lse), &from_q, &from_k, &from_v, size.batch, size.heads,
                                          size.queries, size.keys, size.width, float(scale), windowed(window),
                                          size.dtype, cpu_context()),
            "attention");
  return {out, lse};
}

Three attention_backward(const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k,
                         const Tensor& v, double scale, int64_t window) {
  const Size size(q, k, v);
  const Sizes sizes = sizes_of(q);
  const Tensor queries = with_rows(q), keys = with_rows(k), values = with_rows(v), lses = checked_lse(lse, size);
  const Tensor gradient = checked(dout, "dout", size, sizes), result = checked(out, "out", size, sizes);
  const Tensor dq = new_heads(size, size.queries, q);
  const Tensor dk = new_heads(size, size.keys, q), dv = new_heads(size, size.keys, q);
  const GptliteHeads to_q = writing(dq), to_k = writing(dk), to_v = writing(dv), from = reading(gradient),
                     from_out = reading(result), from_q = reading(queries), from_k = reading(keys),
                     from_v = reading(values);
  check_cpu(gptlite_cpu_attention_backward(&to_q, &to_k, &to_v, &from, &from_out, floats(lses), &from_q, &from_k,
                                           &from_v, size.batch, size.heads, size.queries, size.keys, size.width,
                                           float(scale), windowed(window), size.dtype, cpu_context()),
            "attention_backward");
  return {dq, dk, dv};
}

Two attention_packed(const Tensor& qkv, double scale, int64_t window) {
  const Size size(qkv);
  const Tensor packed = as_contiguous(qkv);
  const Tensor out = empty({size.batch, size.queries, size.heads, size.width}, size.dtype, qkv);
  const Tensor lse = empty({size.batch, size.heads, size.queries}, GPTLITE_FP32, qkv);
  void* const from = const_cast<void*>(data(packed));
  const GptliteHeads to = by_position(out, mutable_data(out)), q = part(packed, from, 0), k = part(packed, from, 1),
                     v = part(packed, from, 2);
  check_cpu(gptlite_cpu_attention_forward(&to, mutable_floats(lse), &q, &k, &v, size.batch, size.heads, size.queries,
                                          size.keys, size.width, float(scale), windowed(window), size.dtype,
                                          cpu_context()),
            "attention_packed");
  return {out, lse};
}

Tensor attention_packed_backward(const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                                 double scale, int64_t window) {
  const Size size(qkv);
  const Sizes sizes{size.batch, size.queries, size.heads, size.width};
  const Tensor packed = as_contiguous(qkv), lses = checked_lse(lse, size), dqkv = new_like(qkv);
  const Tensor gradient = checked(dout, "dout", size, sizes), result = checked(out, "out", size, sizes);
  void* const from = const_cast<void*>(data(packed));
  void* const to = mutable_data(dqkv);
  const GptliteHeads dq = part(dqkv, to, 0), dk = part(dqkv, to, 1), dv = part(dqkv, to, 2),
                     from_dout = by_position(gradient, const_cast<void*>(data(gradient))),
                     from_out = by_position(result, const_cast<void*>(data(result))), q = part(packed, from, 0),
                     k = part(packed, from, 1), v = part(packed, from, 2);
  check_cpu(gptlite_cpu_attention_backward(&dq, &dk, &dv, &from_dout, &from_out, floats(lses), &q, &k, &v, size.batch,
                                           size.heads, size.queries, size.keys, size.width, float(scale),
                                           windowed(window), size.dtype, cpu_context()),
            "attention_packed_backward");
  return dqkv;
}

STABLE_TORCH_LIBRARY_IMPL(gptlite, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_packed", TORCH_BOX(&attention_packed));
  m.impl("attention_packed_backward", TORCH_BOX(&attention_packed_backward));
}

}  // namespace
}  // namespace gptlite::binding
