// Bias and activation of an MLP, forward and backward: y = f(x + bias), or for a gated kind (SwiGLU, GeGLU)
// y = f(gate + bias) * (value + bias). The gate and value of a unit are two adjacent columns of x.
#pragma once

#include "activations.h"
#include "amax.h"
#include "column_sums.h"
#include "pairs.h"

namespace gptlite {
namespace GPTLITE_ISA {

// Activation f(x). `Columns` holds the inputs of one vector of results: here one vector.
template <class F>
struct Plain {
  typedef Vec Columns;
  static constexpr int kColumns = 1;

  template <class T, class Lanes>
  GPTLITE_LAMBDA static Vec load_columns(const T* p, Lanes lanes) {
    return load(p, lanes);
  }
  template <class T, class Lanes>
  GPTLITE_LAMBDA static void store_columns(T* p, Vec v, Lanes lanes) {
    store(p, v, lanes);
  }
  GPTLITE_LAMBDA static Vec value(Vec x) { return F::value(x); }
  GPTLITE_LAMBDA static Vec gradient(Vec dy, Vec x) { return dy * F::slope(x); }

  // Load and store column sums. Gated keeps those of the gates and of the values `width` floats apart.
  template <class Lanes>
  GPTLITE_LAMBDA static Vec load_sums(const float* p, int64_t, Lanes lanes) {
    return load(p, lanes);
  }
  template <class Lanes>
  GPTLITE_LAMBDA static void store_sums(float* p, int64_t, Vec v, Lanes lanes) {
    store(p, v, lanes);
  }
};

// Gated activation f(gate) * value. The inputs of one vector of results are two vectors, gates and values.
template <class F>
struct Gated {
  typedef Pairs Columns;
  static constexpr int kColumns = 2;

  template <class T, class Lanes>
  GPTLITE_LAMBDA static Pairs load_columns(const T* p, Lanes lanes) {
    return load_pairs(p, lanes);
  }
  template <class T, class Lanes>
  GPTLITE_LAMBDA static void store_columns(T* p, Pairs v, Lanes lanes) {
    store_pairs(p, v, lanes);
  }
  GPTLITE_LAMBDA static Vec value(Pairs x) { return F::value(x.first) * x.second; }
  GPTLITE_LAMBDA static Pairs gradient(Vec dy, Pairs x) {
    return Pairs{dy * x.second * F::slope(x.first), dy * F::value(x.first)};
  }

  template <class Lanes>
  GPTLITE_LAMBDA static Pairs load_sums(const float* p, int64_t width, Lanes lanes) {
    return Pairs{load(p, lanes), load(p + width, lanes)};
  }
  template <class Lanes>
  GPTLITE_LAMBDA static void store_sums(float* p, int64_t width, Pairs v, Lanes lanes) {
    store(p, v.first, lanes);
    store(p + width, v.second, lanes);
  }
};

// Calls body(first, count) on ranges of results, across row boundaries. Without a bias, rows do not matter.
template <class Body>
static void for_elements(const void* context, int64_t count, Body body) {
  constexpr int64_t run = 8192;
  parallel(context, (count + run - 1) / run, 2, [&](int64_t first, int64_t last) {
    const int64_t end = last * run < count ? last * run : count;
    body(first * run, end - first * run);
  });
}

template <class A, class T, class Lanes>
GPTLITE_INLINE typename A::Columns sum_at(const T* x, const T* bias, int64_t column, Lanes lanes) {
  typename A::Columns sum = A::load_columns(x + A::kColumns * column, lanes);
  if (bias) sum = sum + A::load_columns(bias + A::kColumns * column, lanes);
  return sum;
}

template <class A, class T>
GPTLITE_INLINE void forward_run(T* y, const T* x, const T* bias, int64_t count) {
  for_columns<2>(count, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    store(y + column, A::value(sum_at<A>(x, bias, column, lanes)), lanes);
  });
}

// Computes dx of `count` results. Adds dx to the column sums of_bias, unless it is NULL.
template <class A, class T>
GPTLITE_INLINE void backward_run(T* dx, const T* dy, const T* x, const T* bias, int64_t count, float* of_bias) {
  for_columns<2>(count, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    const auto gradient = A::gradient(load(dy + column, lanes), sum_at<A>(x, bias, column, lanes));
    A::store_columns(dx + A::kColumns * column, gradient, lanes);
    if (of_bias) {
      A::store_sums(of_bias + column, count, A::load_sums(of_bias + column, count, lanes) + gradient, lanes);
    }
  });
}

template <class A, class T>
static void activation_forward(T* y, const T* x, const T* bias, int64_t rows, int64_t width, const void* context) {
  if (bias == nullptr) {
    for_elements(context, rows * width, [&](int64_t first, int64_t count) {
      forward_run<A>(y + first, x + A::kColumns * first, bias, count);
    });
    return;
  }
  parallel(context, rows, task_items(2 * width), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      forward_run<A>(y + row * width, x + A::kColumns * row * width, bias, width);
    }
  });
}

template <class A, class T>
static void activation_backward(T* dx, T* dbias, float* workspace, const T* dy, const T* x, const T* bias, int64_t rows,
                                int64_t width, const void* context) {
  if (bias == nullptr && dbias == nullptr) {
    for_elements(context, rows * width, [&](int64_t first, int64_t count) {
      const int64_t at = A::kColumns * first;
      backward_run<A>(dx + at, dy + first, x + at, bias, count, nullptr);
    });
    return;
  }
  const int64_t columns = A::kColumns * width;
  const Parts parts = parts_of(rows, width);
  for_parts(context, parts, rows, [&](int64_t part, int64_t first, int64_t last) {
    float* const of_bias = dbias ? workspace + part * columns : nullptr;
    if (of_bias) memset(of_bias, 0, static_cast<size_t>(columns) * sizeof(float));
    for (int64_t row = first; row < last; ++row) {
      backward_run<A>(dx + row * columns, dy + row * width, x + row * columns, bias, width, of_bias);
    }
  });
  if (!dbias) return;
  if (A::kColumns == 1 || parts.count == 0) return sum_parts(context, dbias, workspace, parts.count, columns);
  sum_parts(context, workspace, workspace, parts.count, columns);  // overwrites the first part
  for_columns<1>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    A::store_columns(dbias + A::kColumns * column, A::load_sums(workspace + column, width, lanes), lanes);
  });
}

// Calls f with the activation of `kind` (GPTLITE_GELU_TANH etc.) for results of type T. Returns what f returns.
template <class T, class Function>
GPTLITE_INLINE int with_activation(int kind, Function f) {
  switch (kind) {
    case GPTLITE_GELU_TANH:
      return f(Plain<TanhGelu<T>>{});
    case GPTLITE_GELU_ERF:
      return f(Plain<ErfGelu>{});
    case GPTLITE_RELU:
      return f(Plain<Relu>{});
    case GPTLITE_RELU2:
      return f(Plain<Relu2>{});
    case GPTLITE_SWIGLU:
      return f(Gated<Silu<T>>{});
    case GPTLITE_GEGLU:
      return f(Gated<ErfGelu>{});
    default:
      return GPTLITE_UNSUPPORTED;
  }
}

template <class T>
static int bias_activation_forward_of(void* y, const void* x, const void* bias, int64_t rows, int64_t width, int kind,
                                      float* amax, const void* context) {
  return with_activation<T>(kind, [&](auto activation) {
    activation_forward<decltype(activation)>(static_cast<T*>(y), static_cast<const T*>(x), static_cast<const T*>(bias),
                                             rows, width, context);
    raise_amax<T>(amax, y, rows * width, context);
    return 0;
  });
}

template <class T>
static int bias_activation_backward_of(void* dx, void* dbias, float* workspace, const void* dy, const void* x,
                                       const void* bias, int64_t rows, int64_t width, int kind, float* amax,
                                       const void* context) {
  return with_activation<T>(kind, [&](auto activation) {
    activation_backward<decltype(activation)>(static_cast<T*>(dx), static_cast<T*>(dbias), workspace,
                                              static_cast<const T*>(dy), static_cast<const T*>(x),
                                              static_cast<const T*>(bias), rows, width, context);
    raise_amax<T>(amax, dx, rows * width * decltype(activation)::kColumns, context);
    return 0;
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
