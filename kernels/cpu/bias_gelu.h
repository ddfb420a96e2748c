// GELU of a sum of rows and a bias.
#pragma once

#include "column_sums.h"
#include "gelu.h"

namespace gptlite {
namespace GPTLITE_ISA {

// body(first, count) on runs of elements, where there is no bias and so no rows.
template <class Body>
static void for_elements(const void* context, int64_t count, Body body) {
  constexpr int64_t run = 8192;
  parallel(context, (count + run - 1) / run, 2, [&](int64_t first, int64_t last) {
    const int64_t end = last * run < count ? last * run : count;
    body(first * run, end - first * run);
  });
}

template <class Gelu, class T>
GPTLITE_INLINE void forward_run(T* y, const T* x, const T* bias, int64_t count) {
  for_columns<2>(count, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    Vec sum = load(x + column, lanes);
    if (bias) sum += load(bias + column, lanes);
    store(y + column, Gelu::value(sum), lanes);
  });
}

// Adds to the sums of columns, where they are wanted.
template <class Gelu, class T>
GPTLITE_INLINE void backward_run(T* dx, const T* dy, const T* x, const T* bias, int64_t count, float* of_bias) {
  for_columns<2>(count, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    Vec sum = load(x + column, lanes);
    if (bias) sum += load(bias + column, lanes);
    const Vec slope = load(dy + column, lanes) * Gelu::slope(sum);
    store(dx + column, slope, lanes);
    if (of_bias) store(of_bias + column, load(of_bias + column, lanes) + slope, lanes);
  });
}

template <class Gelu, class T>
static void gelu_forward(T* y, const T* x, const T* bias, int64_t rows, int64_t width, const void* context) {
  if (bias == nullptr) {
    for_elements(context, rows * width, [&](int64_t first, int64_t count) {
      forward_run<Gelu>(y + first, x + first, bias, count);
    });
    return;
  }
  parallel(context, rows, task_items(2 * width), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) forward_run<Gelu>(y + row * width, x + row * width, bias, width);
  });
}

template <class Gelu, class T>
static void gelu_backward(T* dx, T* dbias, float* workspace, const T* dy, const T* x, const T* bias, int64_t rows, int64_t width,
              const void* context) {
  if (bias == nullptr && dbias == nullptr) {
    for_elements(context, rows * width, [&](int64_t first, int64_t count) {
      backward_run<Gelu>(dx + first, dy + first, x + first, bias, count, nullptr);
    });
    return;
  }
  const Parts parts = parts_of(rows, width);
  for_parts(context, parts, rows, [&](int64_t part, int64_t first, int64_t last) {
    float* const of_bias = dbias ? workspace + part * width : nullptr;
    if (of_bias) memset(of_bias, 0, static_cast<size_t>(width) * sizeof(float));
    for (int64_t row = first; row < last; ++row) {
      const int64_t at = row * width;
      backward_run<Gelu>(dx + at, dy + at, x + at, bias, width, of_bias);
    }
  });
  if (dbias) sum_parts(context, dbias, workspace, parts.count, width);
}

template <class T>
static int bias_gelu_forward_of(void* y, const void* x, const void* bias, int64_t rows, int64_t width, int approximate,
                                const void* context) {
  const auto kernel = approximate ? gelu_forward<TanhGelu<T>, T> : gelu_forward<ErfGelu, T>;
  kernel(static_cast<T*>(y), static_cast<const T*>(x), static_cast<const T*>(bias), rows, width, context);
  return 0;
}

template <class T>
static int bias_gelu_backward_of(void* dx, void* dbias, float* workspace, const void* dy, const void* x,
                                 const void* bias, int64_t rows, int64_t width, int approximate, const void* context) {
  const auto kernel = approximate ? gelu_backward<TanhGelu<T>, T> : gelu_backward<ErfGelu, T>;
  kernel(static_cast<T*>(dx), static_cast<T*>(dbias), workspace, static_cast<const T*>(dy), static_cast<const T*>(x),
         static_cast<const T*>(bias), rows, width, context);
  return 0;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
