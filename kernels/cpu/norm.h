// The rows of a layer norm: what layer_norm.cpp and residual_norm.cpp share.
#pragma once

#include <math.h>

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// Of a row: the mean as an fp32 number, what that lacks of the mean, and 1 / sqrt(variance + eps).
struct Moments {
  float mean;
  float rest;
  float rstd;
};

// Rows whose squares are past the range of fp32, or that are not finite.
template <class T>
__attribute__((noinline)) static Moments moments_of_huge(const T* x, int64_t width, float eps) {
  double total = 0, squares = 0;
  for (int64_t column = 0; column < width; ++column) total += to_float(x[column]);
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
  if (!(variance < INFINITY)) return moments_of_huge(x, width, eps);
  const float mean = near_mean + shift;
  // A constant row's variance is 0, not the rounding's difference.
  return Moments{mean, shift - (mean - near_mean), 1.0f / __builtin_sqrtf((variance > 0.0f ? variance : 0.0f) + eps)};
}

template <class T>
GPTLITE_INLINE float mean_of(const T* x, int64_t width) {
  float sums[1];
  sum_columns<1>(width, sums, [&](int64_t column, auto lanes, Vec* terms) GPTLITE_LAMBDA {
    terms[0] += load(x + column, lanes);
  });
  return sums[0] / static_cast<float>(width);
}

template <class T, class W>
GPTLITE_INLINE void normalize(T* y, const T* x, int64_t width, const Moments& row, const W* weight, const W* bias) {
  const float rest = -row.rest * row.rstd;
  for_columns<4>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    const Vec normal = fma(load(x + column, lanes) - row.mean, broadcast(row.rstd), broadcast(rest));
    const Vec shift = bias ? load(bias + column, lanes) : Vec{};
    store(y + column, fma(normal, load(weight + column, lanes), shift), lanes);
  });
}

// The gradient of a row before normalize, rstd * (g - mean(g) - normal * mean(g * normal)) with g = dy * weight: what
// the columns have in common, and as a function that of a column.
struct NormSlope {
  float mean;
  float rstd;
  float mean_slope;
  float mean_product;

  GPTLITE_LAMBDA Vec normal(Vec x) const { return (x - mean) * rstd; }
  GPTLITE_LAMBDA Vec operator()(Vec weighted, Vec normal) const {
    return (weighted - mean_slope - normal * mean_product) * rstd;
  }
};

template <class T, class W>
GPTLITE_INLINE NormSlope norm_slope(const T* dy, const T* x, const W* weight, int64_t width, float mean, float rstd) {
  NormSlope slope{mean, rstd, 0.0f, 0.0f};
  float sums[2];
  sum_columns<2>(width, sums, [&](int64_t column, auto lanes, Vec* terms) GPTLITE_LAMBDA {
    const Vec weighted = load(dy + column, lanes) * load(weight + column, lanes);
    terms[0] += weighted;
    terms[1] = fma(weighted, slope.normal(load(x + column, lanes)), terms[1]);
  });
  slope.mean_slope = sums[0] / static_cast<float>(width);
  slope.mean_product = sums[1] / static_cast<float>(width);
  return slope;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
