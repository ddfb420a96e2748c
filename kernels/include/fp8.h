// Rounding of fp32 to fp8 (Micikevicius et al., arXiv:2209.05433) in plain C++: for the CPU kernels, the emulator and
// GPUs without an instruction for it. To nearest, ties to even; values beyond the largest one become that one.
#pragma once

#include <stdint.h>
#include <string.h>

#include "philox.h"  // GPTLITE_DEVICE

namespace gptlite {

// The smallest amax of a tensor. A tensor of zeros has this one, because its scale must not be 0.
constexpr float kSmallestAmax = 1e-12f;

struct E4m3 {
  uint8_t bits;
  static constexpr int kFraction = 3;   // bits
  static constexpr int kLowest = -6;    // exponent of the smallest normal number
  static constexpr uint32_t kMost = 0x7e;
  static constexpr float kLargest = 448.0f;
};

struct E5m2 {
  uint8_t bits;
  static constexpr int kFraction = 2;
  static constexpr int kLowest = -14;
  static constexpr uint32_t kMost = 0x7b;
  static constexpr float kLargest = 57344.0f;
};

GPTLITE_DEVICE uint32_t fp32_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

GPTLITE_DEVICE float fp32_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Returns the byte of x.
template <typename Format>
GPTLITE_DEVICE uint32_t fp8_bits(float x) {
  constexpr int kDropped = 23 - Format::kFraction;
  const uint32_t bits = fp32_bits(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  // A number of this exponent has the spacing of the subnormal numbers: adding it rounds to a multiple of them.
  const uint32_t unit = static_cast<uint32_t>(127 + Format::kLowest + kDropped) << 23;
  const uint32_t small = fp32_bits(fp32_of(magnitude) + fp32_of(unit)) - unit;
  const uint32_t shifted = magnitude - (static_cast<uint32_t>(126 + Format::kLowest) << 23);
  const uint32_t normal = (shifted + ((1u << (kDropped - 1)) - 1) + (shifted >> kDropped & 1u)) >> kDropped;
  const uint32_t lowest = static_cast<uint32_t>(127 + Format::kLowest) << 23;
  const uint32_t code = magnitude < lowest ? small : normal;
  const uint32_t finite = magnitude >= fp32_bits(Format::kLargest) ? Format::kMost : code;
  return sign | (magnitude > 0x7f800000u ? 0x7fu : finite);
}

}  // namespace gptlite
