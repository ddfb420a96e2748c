// 2^x, to as many digits as the numbers made of it will keep.
#pragma once

#include <stdint.h>

#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr float kLog2e = 0x1.715476p+0f;
constexpr double kLn2 = 0.69314718055994531;

// (2^f - 1) / f for 0 <= f <= 1: minimax of 2^f, exact at 0.
template <int degree>
struct Exp2Terms;
template <>
struct Exp2Terms<4> {  // 2.9e-6 of 2^f
  static constexpr float terms[] = {0.693044841f, 0.241280213f, 0.0522424728f, 0.0134266857f};
};
template <>
struct Exp2Terms<6> {  // 2.0e-9 of 2^f
  static constexpr float terms[] = {0.693147063f,   0.240229309f,   0.0554852821f,
                                    0.00967545155f, 0.00124678458f, 0.000216129163f};
};

// 0 below the normal numbers; NaN stays.
template <int degree>
GPTLITE_INLINE Vec exp2(Vec x) {
#if defined(__AVX512F__)
  const Vec f = _mm512_reduce_ps(x, 1);  // x - floor(x); 0 of -inf
#else
  const float to_integer = 0x1.8p23f;
  const Mask vanishes = less(x, broadcast(-126.0f));
  // x stands second: NaN passes.
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
