// RMS norm (QK norm) and rotary position embedding (RoPE, arXiv:2104.09864) of the query and key heads of a packed qkv
// tensor, forward and backward. Columns i and width / 2 + i of a head, (a, b), become (a cos - b sin, b cos + a sin).
#include "column_sums.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

struct Shape {
  int64_t tokens;
  int64_t angles;  // number of rows of cos and sin
  int64_t groups;
  int64_t queries;  // per group, before its k and v
  int64_t width;

  int64_t rows() const { return groups * (queries + 2); }  // heads per token
};

// Cosines and sines of a token, NULL without a rotation. Sines are multiplied by `sign`, -1 for the inverse rotation.
struct Angles {
  const float* cos;
  const float* sin;
  float sign;
};

GPTLITE_INLINE Angles angles_of(const Angles& all, const Shape& shape, int64_t token) {
  if (all.cos == nullptr) return all;
  const int64_t at = token % shape.angles * (shape.width / 2);
  return Angles{all.cos + at, all.sin + at, all.sign};
}

// Calls body(column, lanes) for the pairs of columns (column, column + width / 2), or without a rotation for all
// columns.
template <bool rotates, class Body>
GPTLITE_INLINE void for_pairs(int64_t width, Body body) {
  for_columns<2>(rotates ? width / 2 : width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    body(column, lanes);
  });
}

template <class Lanes>
GPTLITE_INLINE void rotate(Vec& first, Vec& second, const Angles& angles, int64_t column, Lanes lanes) {
  const Vec cos = load(angles.cos + column, lanes), sin = load(angles.sin + column, lanes) * angles.sign;
  const Vec turned = fma(first, cos, -(second * sin));
  second = fma(second, cos, first * sin);
  first = turned;
}

template <class W, class Lanes>
GPTLITE_INLINE Vec scaled(Vec v, const W* gain, int64_t column, Lanes lanes) {
  return gain ? v * load(gain + column, lanes) : v;
}

// Returns 1 / sqrt(mean(x^2) + eps).
template <class T>
GPTLITE_INLINE float rstd_of(const T* x, int64_t width, float eps) {
  float sums[1];
  sum_columns<1>(width, sums, [&](int64_t column, auto lanes, Vec* terms) GPTLITE_LAMBDA {
    const Vec v = load(x + column, lanes);
    terms[0] = fma(v, v, terms[0]);
  });
  return 1.0f / __builtin_sqrtf(sums[0] / static_cast<float>(width) + eps);
}

template <bool rotates, bool norms, class T, class W>
GPTLITE_INLINE void forward_row(T* out, const T* x, const W* gain, const Angles& angles, int64_t width, float eps) {
  const float rstd = norms ? rstd_of(x, width, eps) : 1.0f;
  for_pairs<rotates>(width, [&](int64_t column, auto lanes) GPTLITE_LAMBDA {
    const int64_t other = column + width / 2;
    Vec first = load(x + column, lanes), second = rotates ? load(x + other, lanes) : Vec{};
    if (norms) first = scaled(first * rstd, gain, column, lanes);
    if (norms && rotates) second = scaled(second * rstd, gain, other, lanes);
    if (rotates) rotate(first, second, angles, column, lanes);
    store(out + column, first, lanes);
    if (rotates) store(out + other, second, lanes);
  });
}

// Computes the gradient of a row: dy is rotated back, then dx = rstd * (w - x * rstd^2 * mean(w * x)) with w = dy *
// gain. Adds the gradient of the gain to of_gain, unless that is NULL.
template <bool rotates, class T, class W>
GPTLITE_INLINE void backward_row(T* dx, const T* dy, const T* x, const W* gain, const Angles& angles, int64_t width,
                                 float eps, float* of_gain) {
  const auto load_dy = [&](int64_t column, auto lanes, Vec& first, Vec& second) GPTLITE_LAMBDA {
    first = load(dy + column, lanes);
    second = rotates ? load(dy + column + width / 2, lanes) : Vec{};
    if (rotates) rotate(first, second, angles, column, lanes);
  };
  Vec squares{}, products{};
  for_pairs<rotates>(width, [&](int64_t column, auto lanes) GPTLITE_LAMBDA {
    Vec first, second;
    load_dy(column, lanes, first, second);
    const Vec in = load(x + column, lanes);
    squares = fma(in, in, squares);
    products = fma(scaled(first, gain, column, lanes), in, products);
    if (rotates) {
      const Vec in_second = load(x + column + width / 2, lanes);
      squares = fma(in_second, in_second, squares);
      products = fma(scaled(second, gain, column + width / 2, lanes), in_second, products);
    }
  });
  const float count = static_cast<float>(width), rstd = 1.0f / __builtin_sqrtf(sum(squares) / count + eps);
  const float slope = rstd * rstd * (sum(products) / count);
  const auto finish = [&](int64_t column, auto lanes, Vec upper) GPTLITE_LAMBDA {
    const Vec in = load(x + column, lanes);
    const Vec found = (scaled(upper, gain, column, lanes) - in * slope) * rstd;
    if (of_gain) store(of_gain + column, fma(upper, in * rstd, load(of_gain + column, lanes)), lanes);
    store(dx + column, found, lanes);
  };
  for_pairs<rotates>(width, [&](int64_t column, auto lanes) GPTLITE_LAMBDA {
    Vec first, second;
    load_dy(column, lanes, first, second);
    finish(column, lanes, first);
    if (rotates) finish(column + width / 2, lanes, second);
  });
}

// Calls row(at, is_key) for the query and key heads of a token, which start `at` elements into the token. Copies v.
template <class T, class Row>
GPTLITE_INLINE void for_heads(const Shape& shape, T* out, const T* in, Row row) {
  for (int64_t group = 0, at = 0; group < shape.groups; ++group) {
    for (int64_t query = 0; query < shape.queries; ++query, at += shape.width) row(at, false);
    row(at, true);
    at += shape.width;
    memcpy(out + at, in + at, static_cast<size_t>(shape.width) * sizeof(T));
    at += shape.width;
  }
}

template <bool rotates, bool norms, class T, class W>
void forward(T* out, const T* x, Angles angles, const W* q_gain, const W* k_gain, const Shape& shape, float eps,
             const void* context) {
  const int64_t row = shape.rows() * shape.width;
  parallel(context, shape.tokens, task_items(row), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const Angles here = angles_of(angles, shape, token);
      T* const to = out + token * row;
      const T* const from = x + token * row;
      for_heads(shape, to, from, [&](int64_t at, bool is_key) GPTLITE_LAMBDA {
        forward_row<rotates, norms>(to + at, from + at, is_key ? k_gain : q_gain, here, shape.width, eps);
      });
    }
  });
}

template <bool rotates, class T, class W>
void backward(T* dx, W* dq_gain, W* dk_gain, float* workspace, const T* dy, const T* x, Angles angles, const W* q_gain,
              const W* k_gain, const Shape& shape, float eps, const void* context) {
  const int64_t row = shape.rows() * shape.width, width = shape.width;
  const Parts parts = parts_of(shape.tokens, row);
  float* const of_q = workspace;
  float* const of_k = workspace + parts.count * width;
  for_parts(context, parts, shape.tokens, [&](int64_t part, int64_t begin, int64_t end) {
    float* const sums[] = {dq_gain ? of_q + part * width : nullptr, dk_gain ? of_k + part * width : nullptr};
    for (float* each : sums)
      if (each) memset(each, 0, static_cast<size_t>(width) * sizeof(float));
    for (int64_t token = begin; token < end; ++token) {
      const Angles here = angles_of(angles, shape, token);
      const int64_t start = token * row;
      for_heads(shape, dx + start, dy + start, [&](int64_t head, bool is_key) GPTLITE_LAMBDA {
        const int64_t at = start + head;
        backward_row<rotates>(dx + at, dy + at, x + at, is_key ? k_gain : q_gain, here, width, eps, sums[is_key]);
      });
    }
  });
  if (dq_gain) sum_parts(context, dq_gain, of_q, parts.count, width);
  if (dk_gain) sum_parts(context, dk_gain, of_k, parts.count, width);
}

// Runs the forward pass for element type T and gain type W. Without a norm this is also the backward pass, with the
// sign of the angles reversed.
template <class T, class W>
void forward_any(void* out, const void* x, const Angles& angles, const void* q_gain, const void* k_gain,
                 const Shape& shape, float eps, const void* context) {
  const auto kernel = angles.cos == nullptr ? forward<false, true, T, W>
                      : eps < 0             ? forward<true, false, T, W>
                                            : forward<true, true, T, W>;
  kernel(static_cast<T*>(out), static_cast<const T*>(x), angles, static_cast<const W*>(q_gain),
         static_cast<const W*>(k_gain), shape, eps, context);
}

// Calls f(T{}, W{}) with the type of the elements and that of the gains, which is the same or fp32.
template <class Function>
int with_dtypes(int dtype, int gain_dtype, Function f) {
  return with_dtype(dtype, [&](auto element) {
    if (gain_dtype == dtype) return f(element, element);
    return gain_dtype == GPTLITE_FP32 ? f(element, float{}) : int{GPTLITE_UNSUPPORTED};
  });
}

}  // namespace

int rope_forward(void* out, const void* qkv, const float* cos, const float* sin, const void* q_gain,
                 const void* k_gain, int64_t tokens, int64_t angles, int64_t groups, int64_t queries, int64_t width,
                 float eps, int dtype, int gain_dtype, void* context) {
  return with_dtypes(dtype, gain_dtype, [&](auto element, auto gain_element) {
    forward_any<decltype(element), decltype(gain_element)>(out, qkv, Angles{cos, sin, 1.0f}, q_gain, k_gain,
                                                           Shape{tokens, angles, groups, queries, width}, eps, context);
    return 0;
  });
}

int rope_backward(void* dqkv, void* dq_gain, void* dk_gain, float* workspace, const void* dout, const void* qkv,
                  const float* cos, const float* sin, const void* q_gain, const void* k_gain, int64_t tokens,
                  int64_t angles, int64_t groups, int64_t queries, int64_t width, float eps, int dtype, int gain_dtype,
                  void* context) {
  const Shape shape{groups == 0 ? 0 : tokens, angles, groups, queries, width};  // without heads there is no workspace
  const Angles back{cos, sin, -1.0f};
  return with_dtypes(dtype, gain_dtype, [&](auto element, auto gain_element) {
    using T = decltype(element);
    using W = decltype(gain_element);
    if (eps < 0) {
      forward_any<T, W>(dqkv, dout, back, nullptr, nullptr, shape, eps, context);
      return 0;
    }
    const auto kernel = cos == nullptr ? backward<false, T, W> : backward<true, T, W>;
    kernel(static_cast<T*>(dqkv), static_cast<W*>(dq_gain), static_cast<W*>(dk_gain), workspace,
           static_cast<const T*>(dout), static_cast<const T*>(qkv), back, static_cast<const W*>(q_gain),
           static_cast<const W*>(k_gain), shape, eps, context);
    return 0;
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
