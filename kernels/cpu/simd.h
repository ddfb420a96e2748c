// Vectors of fp32 lanes for the instruction set that the file is compiled for: 16 lanes (AVX-512), 8 (AVX2, FMA, F16C)
// or 4 (NEON, and any other). `Vec` is a vector type of the compiler, so + - * / and unary - work on it, also with a float.
//
//   load(p, lanes), store(p, v, lanes)   access fp32, bf16 or fp16 in memory (float, Bf16, Half), with any alignment.
//   lanes                                All{} or First{n}, the first n lanes, 0 < n < kLanes. Memory after them is not
//                                        accessed, and load sets the other lanes to 0.
//   for_columns<n>(width, body)          calls body(column, Index<k>, lanes) along a row; k < n selects an accumulator.
//   sum_columns<n>(width, sums, body)    computes n sums over a row.
//   with_dtype(dtype, f)                 returns f(T{}) with T = float, Bf16 or Half, or GPTLITE_UNSUPPORTED.
//
// All functions are static and always inlined: the linker could merge copies of a function, so that code for an older
// CPU calls one for a newer CPU. So kernels do not call templates of the standard library that may not be inlined.
#pragma once

#include "simd_memory.h"

namespace gptlite {
namespace GPTLITE_ISA {

// ---- elementary functions

// Returns exp(x) for x <= 88 within 1.2 ULP, exp(0) = 1, NaN for NaN, and 0 where the result would be subnormal: some
// CPUs are a hundred times slower with subnormals.
GPTLITE_INLINE Vec exp_below_88(Vec x) {
  const float log2e = 0x1.715476p+0f, ln2 = 0x1.62e4p-1f, ln2_rest = 0x1.7f7d1cp-20f, to_integer = 0x1.8p23f;
  const Vec least = broadcast(-87.33654f);
  const Vec shifted = fma(x, broadcast(log2e), broadcast(to_integer)), power = shifted - to_integer;
  const Vec r = fma(power, broadcast(-ln2_rest), fma(power, broadcast(-ln2), x));
  // (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2, by a minimax polynomial with an error of 3e-9 exp(r).
  Vec p = fma(broadcast(1.3814467e-3f), r, broadcast(8.3687804e-3f));
  p = fma(p, r, broadcast(4.1668394e-2f));
  p = fma(p, r, broadcast(1.6666520e-1f));
  p = fma(p, r, broadcast(4.9999993e-1f));
  p = fma(fma(p, r, broadcast(1.0f)), r, broadcast(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), p, power);
#else
  // 2^power as a product of two factors, so that both are normal numbers.
  const Mask whole = (Mask)(words(shifted) - float_to_bits(to_integer)), half = whole >> 1;
  const Vec found = p * (Vec)((half + 127) << 23) * (Vec)((whole - half + 127) << 23);
  return select(less(x, least), Vec{}, found);
#endif
}

// Returns exp(x) for any x, +inf if it overflows.
GPTLITE_INLINE Vec exp(Vec x) { return exp_below_88(min(broadcast(89.0f), x)); }

// Returns 1 / v with an error of at most 2 ULP, for 1e-30 < v < 1e30.
GPTLITE_INLINE Vec reciprocal(Vec v) {
#if defined(__AVX512F__)
  const Vec near = _mm512_rcp14_ps(v);
  return fma(near, fma(-v, near, broadcast(1.0f)), near);
#else
  return 1.0f / v;
#endif
}

// ---- loops over rows, and dispatch on the dtype

template <class Body, int... accumulators>
GPTLITE_INLINE int64_t full_columns(int64_t width, Body& body, std::integer_sequence<int, accumulators...>) {
  constexpr int64_t step = static_cast<int64_t>(sizeof...(accumulators)) * kLanes;
  int64_t column = 0;
  for (; column + step <= width; column += step) {
    (body(column + accumulators * kLanes, Index<accumulators>{}, All{}), ...);
  }
  return column;
}

template <int accumulators, class Body>
GPTLITE_INLINE void for_columns(int64_t width, Body body) {
  int64_t column = full_columns(width, body, std::make_integer_sequence<int, accumulators>{});
  if (accumulators > 1) {
    for (; column + kLanes <= width; column += kLanes) body(column, Index<0>{}, All{});
  }
  if (column < width) body(column, Index<0>{}, First{static_cast<int>(width - column)});
}

// Computes `count` sums over a row, in a fixed order and in blocks, so that the error does not grow with the width.
// body(column, lanes, terms) adds a vector to each of terms[0] to terms[count - 1], with 0 in lanes past the row.
template <int count, class Body>
GPTLITE_INLINE void sum_columns(int64_t width, float (&sums)[count], Body body) {
  constexpr int accumulators = count == 1 ? 4 : 2;
  constexpr int64_t block = 256 * kLanes;  // at most 128 terms are added in each lane
  Vec totals[count] = {};
  for (int64_t first = 0; first < width; first += block) {
    Vec terms[accumulators][count] = {};
    for_columns<accumulators>(width - first < block ? width - first : block,
                              [&](int64_t column, auto k, auto lanes) GPTLITE_LAMBDA {
                                body(first + column, lanes, terms[k.value]);
                              });
    for (int i = 0; i < count; ++i) {
      totals[i] += terms[0][i] + terms[1][i];
      if (accumulators == 4) totals[i] += terms[accumulators - 2][i] + terms[accumulators - 1][i];
    }
  }
  for (int i = 0; i < count; ++i) sums[i] = sum(totals[i]);
}

template <class Function>
GPTLITE_INLINE int with_dtype(int dtype, Function function) {
  switch (dtype) {
    case GPTLITE_FP32:
      return function(float{});
    case GPTLITE_BF16:
      return function(Bf16{});
    case GPTLITE_FP16:
      return function(Half{});
    default:
      return GPTLITE_UNSUPPORTED;
  }
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
