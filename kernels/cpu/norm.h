// The rows of a layer norm, or of an RMS norm (Rms): what layer_norm.cpp and residual_norm.cpp share.
#pragma once

#include <math.h>

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// f(std::true_type) for an RMS norm, else f(std::false_type).
template <class Function>
GPTLITE_INLINE int with_norm(bool rms, Function function) {
  return rms ? function(std::true_type{}) : function(std::false_type{});
}

// Of a row: the mean as an fp32 number, what that lacks of the mean, and 1 / sqrt(variance + eps). An RMS norm takes the
// mean as 0.
struct Moments {
  float mean;
  float rest;
  float rstd;
};

// Rows whose squares are past the range of fp32, or that are not finite.
template <bool Rms, class T>
__attribute__((noinline)) static Moments moments_of_huge(const T* x, int64_t width, float eps) {
  double total = 0, squares = 0;
  for (int64_t column = 0; !Rms && column < width; ++column) total += to_float(x[column]);
  const double mean = total / static_cast<double>(width);
  for (int64_t column = 0; column < width; ++column) {
    const double apart = to_float(x[column]) - mean;
    squares += apart * apart;
  }
  const double variance = squares / static_cast<double>(width);
  return Moments{static_cast<float>(mean), 0.0f, static_cast<float>(1 / __builtin_sqrt(variance + eps))};
}

// near_mean: a number near the row's mean. Only the differences from it are squared, so a variance much smaller than
// the mean is right, and so is the mean where the sum that gave it was rounded.
template <class T>
GPTLITE_INLINE Moments moments(const T* x, int64_t width, float near_mean, float eps) {
  float sums[2];
  sum_columns<2>(width, sums, [&](int64_t column, auto lanes, Vec* terms) GPTLITE_LAMBDA {
    const Vec apart = zero_past(load(x + column, lanes) - near_mean, lanes);
    terms[0] += apart;
    terms[1] = fma(apart, apart, terms[1]);
  });
  const float count = static_cast<float>(width), shift = sums[0] / count;
  const float variance = sums[1] / count - shift * shift;
  if (!(variance < INFINITY)) return moments_of_huge<false>(x, width, eps);
  const float mean = near_mean + shift;
  // A constant row's variance is 0, not the rounding's difference.
  return Moments{mean, shift - (mean - near_mean), 1.0f / __builtin_sqrtf((variance > 0.0f ? variance : 0.0f) + eps)};
}

template <class T>
GPTLITE_INLINE Moments rms_moments(const T* x, int64_t width, float eps) {
  float sums[1];
  sum_columns<1>(width, sums, [&](int64_t column, auto lanes, Vec* terms) GPTLITE_LAMBDA {
    const Vec in = load(x + column, lanes);
    terms[0] = fma(in, in, terms[0]);
  });
  const float square = sums[0] / static_cast<float>(width);
  if (!(square < INFINITY)) return moments_of_huge<true>(x, width, eps);
  return Moments{0.0f, 0.0f, 1.0f / __builtin_sqrtf(square + eps)};
}

template <class T>
GPTLITE_INLINE float mean_of(const T* x, int64_t width) {
  float sums[1];
  sum_columns<1>(width, sums, [&](int64_t column, auto lanes, Vec* terms) GPTLITE_LAMBDA {
    terms[0] += load(x + column, lanes);
  });
  return sums[0] / static_cast<float>(width);
}

// v times the weights of its columns; an RMS norm may have none.
template <bool Rms, class W, class Lanes>
GPTLITE_INLINE Vec weighted(Vec v, const W* weight, int64_t column, Lanes lanes) {
  return Rms && !weight ? v : v * load(weight + column, lanes);
}

template <bool Rms, class T, class W>
GPTLITE_INLINE void normalize(T* y, const T* x, int64_t width, const Moments& row, const W* weight, const W* bias) {
  const float rest = -row.rest * row.rstd;
  for_columns<4>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    if (Rms) {
      store(y + column, weighted<true>(load(x + column, lanes) * row.rstd, weight, column, lanes), lanes);
      return;
    }
    const Vec normal = fma(load(x + column, lanes) - row.mean, broadcast(row.rstd), broadcast(rest));
    const Vec shift = bias ? load(bias + column, lanes) : Vec{};
    store(y + column, fma(normal, load(weight + column, lanes), shift), lanes);
  });
}

// The gradient of a row before normalize, rstd * (g - mean(g) - normal * mean(g * normal)) with g = dy * weight, without
// mean(g) for an RMS norm: what the columns have in common, and as a function that of a column.
template <bool Rms>
struct NormSlope {
  float mean;
  float rstd;
  float mean_slope;
  float mean_product;

  GPTLITE_LAMBDA Vec normal(Vec x) const { return Rms ? x * rstd : (x - mean) * rstd; }
  GPTLITE_LAMBDA Vec operator()(Vec weighted, Vec normal) const {
    return Rms ? (weighted - normal * mean_product) * rstd : (weighted - mean_slope - normal * mean_product) * rstd;
  }
};

template <bool Rms, class T, class W>
GPTLITE_INLINE NormSlope<Rms> norm_slope(const T* dy, const T* x, const W* weight, int64_t width, float mean,
                                         float rstd) {
  NormSlope<Rms> slope{mean, rstd, 0.0f, 0.0f};
  constexpr int product = Rms ? 0 : 1;  // an RMS norm has this sum alone
  float sums[product + 1];
  sum_columns<product + 1>(width, sums, [&](int64_t column, auto lanes, Vec* terms) GPTLITE_LAMBDA {
    const Vec upper = weighted<Rms>(load(dy + column, lanes), weight, column, lanes);
    if (!Rms) terms[0] += upper;
    terms[product] = fma(upper, slope.normal(load(x + column, lanes)), terms[product]);
  });
  if (!Rms) slope.mean_slope = sums[0] / static_cast<float>(width);
  slope.mean_product = sums[product] / static_cast<float>(width);
  return slope;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
