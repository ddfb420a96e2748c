// Activations and their slopes. NaN stays.
//
// GELU by tanh's approximation and exact, and SiLU: within 1e-6 of the result (tanh: below -3 within 1.1e-5; 0 where exp
// is, which is where the result is below 1e-36); at -inf 0, the limit. For results of 16 bits tanh's and SiLU are within
// 4e-6, a hundredth of their rounding.
#pragma once

#include <type_traits>

#include "exp2.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

// |x|, but no more than where the GELU of an fp32 number is the number or 0, and the powers below are still small.
GPTLITE_INLINE Vec size_of(Vec x) { return min(broadcast(20.0f), abs(x)); }

template <class T>
constexpr bool kIsWide = std::is_same<T, float>::value;

// Of results of T: exp(u), where u is measured in units of 1 / kExpUnit.
template <class T>
constexpr float kExpUnit = kIsWide<T> ? 1.0f : kLog2e;
template <class T>
GPTLITE_INLINE Vec exp_of(Vec u) {
  if constexpr (kIsWide<T>) return exp_below_88(u);
  return exp2<4>(u);
}

// Of results of T: x * sigmoid(u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3). For either sign:
// max(x, 0) - |x| sigmoid(-|u|), which loses nothing where the result is small.
template <class T>
struct TanhGelu {
  GPTLITE_LAMBDA static Vec value(Vec x) {
    const Vec size = size_of(x), decay = exp_of<T>(minus_inner(size));
    return max(x, Vec{}) - size * decay * reciprocal(decay + 1.0f);
  }

  GPTLITE_LAMBDA static Vec slope(Vec x) {
    const Vec size = size_of(x), decay = exp_of<T>(minus_inner(size)), upper = reciprocal(decay + 1.0f);
    const Vec lower = decay * upper;  // the sigmoids of |u| and -|u|
    const Vec minus_slope = size * fma(size * size, broadcast(-3.0f * kCube), broadcast(-kLine));
    // Of -|x|; the slopes of x and -x add up to 1.
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

// x * sigmoid(x), likewise: max(x, 0) - |x| sigmoid(-|x|).
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
  // |x|, but no more than where exp(-|x|) is 0.
  GPTLITE_LAMBDA static Vec clipped(Vec x) { return min(broadcast(128.0f), abs(x)); }
};

// x * Phi(x), likewise: max(x, 0) - |x| Phi(-|x|).
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
  // exp(-size^2 / 2), the square's own rounding made good.
  GPTLITE_LAMBDA static Vec exp_of_square(Vec size) {
    const Vec half = size * -0.5f, power = half * size, near = exp_below_88(power);
    return fma(near, fma(half, size, -power), near);
  }

  // Phi(-size) over exp_of_square, as a polynomial of t: minimax up to 14.6, to 6e-8.
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
