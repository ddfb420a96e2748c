// Vectorized 2^x for attention and activations, by a polynomial whose degree sets the accuracy: degree 4 for results
// that are rounded to 16 bits, 6 for fp32.
#pragma once

#include <stdint.h>

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr float kLog2e = 0x1.715476p+0f;
constexpr double kLn2 = 0.69314718055994531;

// Coefficients of (2^f - 1) / f for 0 <= f <= 1, a minimax approximation of 2^f that is exact at f = 0. The comments
// beside them give the relative error of 2^f.
template <int degree>
struct Exp2Terms;
template <>
struct Exp2Terms<4> {  // error 2.9e-6
  static constexpr float terms[] = {0.693044841f, 0.241280213f, 0.0522424728f, 0.0134266857f};
};
template <>
struct Exp2Terms<6> {  // error 2.0e-9
  static constexpr float terms[] = {0.693147063f,   0.240229309f,   0.0554852821f,
                                    0.00967545155f, 0.00124678458f, 0.000216129163f};
};

// Returns 2^x: 0 where it would be subnormal, NaN for NaN. Splits x into floor(x), which becomes the exponent, and
// f = x - floor(x).
template <int degree>
GPTLITE_INLINE Vec exp2(Vec x) {
#if defined(__AVX512F__)
  const Vec f = _mm512_reduce_ps(x, 1);  // x - floor(x), and 0 for -inf
#else
  const float to_integer = 0x1.8p23f;
  const Mask vanishes = less(x, broadcast(-126.0f));
  // max and min return the second operand if either is NaN, so NaN passes the clamp.
  x = min(broadcast(127.5f), max(broadcast(-126.0f), x));
  const Vec shifted = (x - 0.5f) + to_integer, f = x - (shifted - to_integer);
#endif
  Vec p = broadcast(Exp2Terms<degree>::terms[degree - 1]);
#pragma GCC unroll 8
  for (int i = degree - 2; i >= 0; --i) p = fma(p, f, broadcast(Exp2Terms<degree>::terms[i]));
  p = fma(p, f, broadcast(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, x);  // times 2^floor(x)
#else
  const Words power = words(shifted) - float_to_bits(to_integer);
  return select(vanishes, Vec{}, p * floats((power + 127u) << 23));
#endif
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
