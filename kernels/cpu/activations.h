// Activations and their derivatives (`slope`): GELU (arXiv:1606.08415), exact and with the tanh approximation, SiLU,
// ReLU and squared ReLU. NaN gives NaN.
//
// The relative error of GELU and SiLU is below 1e-6 (tanh GELU of x < -3: 1.1e-5). Results below 1e-36 may be 0, and
// the result at -inf is the limit, 0. For 16-bit results, tanh GELU and SiLU use a shorter exponential; their error is
// below 4e-6, a hundredth of the rounding error.
#pragma once

#include <type_traits>

#include "exp2.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// Returns |x|, but at most 20, where GELU in fp32 is already x or 0. The limit keeps the powers below small.
GPTLITE_INLINE Vec size_of(Vec x) { return min(broadcast(20.0f), abs(x)); }

template <class T>
constexpr bool kIsWide = std::is_same<T, float>::value;

// exp_of<T>(u) returns exp(u / kExpUnit<T>), accurate enough for results of type T. For 16 bits that is a power of 2,
// and the caller folds the factor log2(e) into another constant.
template <class T>
constexpr float kExpUnit = kIsWide<T> ? 1.0f : kLog2e;
template <class T>
GPTLITE_INLINE Vec exp_of(Vec u) {
  if constexpr (kIsWide<T>) return exp_below_88(u);
  return exp2<4>(u);
}

// x * sigmoid(u) with u = 2 sqrt(2 / pi) (x + 0.044715 x^3), for results of type T. For both signs of x this is
// max(x, 0) - |x| sigmoid(-|u|), which has no cancellation where the result is small.
template <class T>
struct TanhGelu {
  GPTLITE_LAMBDA static Vec value(Vec x) {
    const Vec size = size_of(x), decay = exp_of<T>(minus_inner(size));
    return max(x, Vec{}) - size * decay * reciprocal(decay + 1.0f);
  }

  GPTLITE_LAMBDA static Vec slope(Vec x) {
    const Vec size = size_of(x), decay = exp_of<T>(minus_inner(size)), upper = reciprocal(decay + 1.0f);
    const Vec lower = decay * upper;  // upper and lower: sigmoids of |u| and -|u|
    const Vec minus_slope = size * fma(size * size, broadcast(-3.0f * kCube), broadcast(-kLine));
    // The slope at -|x|. The slopes at x and -x add up to 1.
    const Vec below = fma(minus_slope * upper, lower, lower);
    return select(less(x, Vec{}), below, 1.0f - below);
  }

 private:
  static constexpr float kLine = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCube = 0.0713548162726f;
  static constexpr float kUnit = kExpUnit<T>;

  GPTLITE_LAMBDA static Vec minus_inner(Vec size) {
    return size * fma(size * size, broadcast(-kCube * kUnit), broadcast(-kLine * kUnit));
  }
};

// x * sigmoid(x), computed in the same way as max(x, 0) - |x| sigmoid(-|x|).
template <class T>
struct Silu {
  GPTLITE_LAMBDA static Vec value(Vec x) {
    const Vec size = clipped(x), decay = exp_of<T>(size * -kExpUnit<T>);
    return max(x, Vec{}) - size * decay * reciprocal(decay + 1.0f);
  }

  GPTLITE_LAMBDA static Vec slope(Vec x) {
    const Vec size = clipped(x), decay = exp_of<T>(size * -kExpUnit<T>), upper = reciprocal(decay + 1.0f);
    const Vec lower = decay * upper, below = fma(-size * upper, lower, lower);
    return select(less(x, Vec{}), below, 1.0f - below);
  }

 private:
  // Returns |x|, but at most 128, where exp(-|x|) is already 0.
  GPTLITE_LAMBDA static Vec clipped(Vec x) { return min(broadcast(128.0f), abs(x)); }
};

// x * Phi(x), computed as max(x, 0) - |x| Phi(-|x|). Phi is the distribution function of the standard normal.
struct ErfGelu {
  GPTLITE_LAMBDA static Vec value(Vec x) {
    const Vec size = size_of(x);
    return max(x, Vec{}) - size * exp_of_square(size) * tail(size);
  }

  GPTLITE_LAMBDA static Vec slope(Vec x) {
    const Vec size = size_of(x);
    const Vec below = exp_of_square(size) * fma(size, broadcast(-0.3989422804f), tail(size));
    return select(less(x, Vec{}), below, 1.0f - below);
  }

 private:
  // Returns exp(-size^2 / 2). The factor 1 + d corrects for the rounding error d of the exponent.
  GPTLITE_LAMBDA static Vec exp_of_square(Vec size) {
    const Vec half = size * -0.5f, power = half * size, near = exp_below_88(power);
    return fma(near, fma(half, size, -power), near);
  }

  // Returns Phi(-size) / exp(-size^2 / 2), by a polynomial in t. It is minimax for sizes up to 14.6, with an error of
  // 6e-8.
  GPTLITE_LAMBDA static Vec tail(Vec size) {
    const Vec t = reciprocal(fma(size, broadcast(0.3f), broadcast(1.0f)));
    Vec p = fma(broadcast(3.84117586e-2f), t, broadcast(-1.69328648e-1f));
    p = fma(p, t, broadcast(2.28995458e-1f));
    p = fma(p, t, broadcast(-7.68894936e-2f));
    p = fma(p, t, broadcast(1.42799588e-1f));
    p = fma(p, t, broadcast(9.45713029e-2f));
    p = fma(p, t, broadcast(1.21948971e-1f));
    p = fma(p, t, broadcast(1.19483690e-1f));
    return fma(p, t, broadcast(7.40250710e-6f));
  }
};

struct Relu {
  GPTLITE_LAMBDA static Vec value(Vec x) { return max(Vec{}, x); }
  GPTLITE_LAMBDA static Vec slope(Vec x) { return select(less(Vec{}, x), broadcast(1.0f), value(x)); }
};

struct Relu2 {  // ReLU squared
  GPTLITE_LAMBDA static Vec value(Vec x) { return Relu::value(x) * Relu::value(x); }
  GPTLITE_LAMBDA static Vec slope(Vec x) { return 2.0f * Relu::value(x); }
};

}  // namespace GPTLITE_ISA
}  // namespace gptlite
