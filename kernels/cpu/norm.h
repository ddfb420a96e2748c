// Layer norm and RMS norm (Rms) of a row, forward and backward. Shared by layer_norm.cpp and residual_norm.cpp.
#pragma once

#include <math.h>

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// Calls `function` with `rms` as a compile-time constant.
template <class Function>
GPTLITE_INLINE int with_norm(bool rms, Function function) {
  return rms ? function(std::true_type{}) : function(std::false_type{});
}

// Moments of a row: the mean rounded to fp32, the rounding error of the mean (`rest`), and 1 / sqrt(variance + eps).
// The mean of an RMS norm is 0.
struct Moments {
  float mean;
  float rest;
  float rstd;
};

// Computes the moments in double, for rows that are not finite or whose sum of squares overflows fp32.
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

// Computes the moments of a row from a number near its mean. Only differences from near_mean are squared, so there is
// no cancellation if the variance is much smaller than the mean, and rounding errors of near_mean are corrected.
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
  // Rounding may make the variance of a constant row slightly negative.
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

// Returns v times the weights of its columns. An RMS norm may have no weight.
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

// Gradient of a row's input: rstd * (g - mean(g) - normal * mean(g * normal)) with g = dy * weight and the normalized
// row `normal`. An RMS norm has no term mean(g). The members are the factors that all columns share.
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
  constexpr int product = Rms ? 0 : 1;  // index of the sum g * normal, the only one of an RMS norm
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
