// Conversion between fp32 and bf16 or fp16 bits in plain C++, for the emulator (kernels/emu), which has no GPU
// instructions. Rounds to nearest, ties to even, like the GPU.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace gptlite {

inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if (isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t float_to_fp16(float x) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  // Below 2^-14, fp16 values are multiples of 2^-24. So are fp32 values in [0.5, 1): adding 0.5 rounds to that
  // multiple.
  if (magnitude < 0x38800000)
    return static_cast<uint16_t>(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000));
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

inline float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 0) return bits_float(sign | float_bits(static_cast<float>(fraction) * 0x1p-24f));
  return bits_float(sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13);
}

}  // namespace gptlite
