// Blockwise quantization of fp32 to 8, 4 or 1 bits. Loops over a block have constant lengths, and the compiler
// vectorizes them. No result depends on the instruction set: maxima are those of bit patterns, sums are made by halves.
#include <string.h>

#include "parallel.h"
#include "simd_memory.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

constexpr float kToInteger = 0x1.8p23f;  // a float below 2^22 plus this has its integer, rounded to even, in its low bits

template <int bits>
struct Format {
  static constexpr int kWidth = bits == 1 ? 1024 : 256;
  static constexpr int kCodes = kWidth * bits / 8;  // bytes of a block
  static constexpr int kParts = 8 / bits;           // values of a byte, kCodes values apart
  static constexpr float kMost = float((1 << (bits - 1)) - 1);
};

// Replaces infinity and any NaN by the same NaN.
GPTLITE_INLINE float finite_or_nan(float scale) { return scale <= 0x1.fffffep127f ? scale : bits_to_float(0x7fc00000u); }

GPTLITE_INLINE uint32_t rounded(float value, float scale, float most) {
  const float quotient = value / scale;
  const float clamped = quotient < -most ? -most : quotient > most ? most : quotient;
  return float_to_bits(clamped + kToInteger);
}

template <int bits>
GPTLITE_INLINE float quantize_integers(uint8_t* __restrict codes, const float* __restrict x) {
  using F = Format<bits>;
  uint32_t largest = 0;
  for (int i = 0; i < F::kWidth; ++i) {
    const uint32_t size = float_to_bits(x[i]) & 0x7fffffffu;  // in the order of |x|, with NaN above infinity
    largest = size > largest ? size : largest;
  }
  const float scale = finite_or_nan(bits_to_float(largest) / F::kMost);
  if (!(scale > 0)) {
    memset(codes, 0, F::kCodes);
    return scale;
  }
  for (int i = 0; i < F::kCodes; ++i) {
    uint32_t byte = rounded(x[i], scale, F::kMost);
    if (bits == 4) byte = (byte & 15u) | rounded(x[i + F::kCodes * (F::kParts - 1)], scale, F::kMost) << 4;
    codes[i] = static_cast<uint8_t>(byte);
  }
  return scale;
}

template <int half>
GPTLITE_INLINE void fold(float* sums) {
  for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  if constexpr (half > 1) fold<half / 2>(sums);
}

template <bool masked>
GPTLITE_INLINE float quantize_signs(uint8_t* __restrict codes, const float* __restrict x,
                                    const uint8_t* __restrict mask) {
  using F = Format<1>;
  constexpr int half = F::kWidth / 2;
  float sums[F::kWidth];
  int count = masked ? 0 : F::kWidth;
  for (int i = 0; i < F::kWidth; ++i) {
    // x * 0 is 0 for what ought to be zero, and NaN for what is not finite.
    const float size = bits_to_float(float_to_bits(x[i]) & 0x7fffffffu), nothing = x[i] * 0.0f;
    sums[i] = !masked || mask[i] ? size : nothing;
    if (masked) count += mask[i];
  }
  fold<half>(sums);
  for (int i = 0; i < F::kCodes; ++i) {
    uint32_t byte = 0;
    for (int part = 0; part < F::kParts; ++part) {
      const uint32_t negative = x[part * F::kCodes + i] < 0 ? 1u << part : 0;
      byte |= masked ? mask[part * F::kCodes + i] ? negative : 0 : negative;
    }
    codes[i] = static_cast<uint8_t>(byte);
  }
  return finite_or_nan(sums[0] / static_cast<float>(count > 0 ? count : 1));
}

template <int bits, bool masked>
GPTLITE_INLINE void dequantize(float* __restrict x, const uint8_t* __restrict codes, const uint8_t* __restrict mask,
                               float scale) {
  using F = Format<bits>;
  for (int part = 0; part < F::kParts; ++part) {
    for (int i = 0; i < F::kCodes; ++i) {
      const int at = part * F::kCodes + i;
      int code;
      if (bits == 1) {
        code = 1 - 2 * (codes[i] >> part & 1);
        if (masked) code = mask[at] ? code : 0;
      } else {
        code = static_cast<int8_t>(codes[i] << (8 - bits * (part + 1))) >> (8 - bits);
      }
      x[at] = static_cast<float>(code) * scale;  // NaN if the scale is, for 0 too
    }
  }
}

template <int bits, bool masked>
void quantize_all(uint8_t* message, const float* x, const uint8_t* mask, int64_t blocks, const void* context) {
  using F = Format<bits>;
  uint8_t* const codes = message + blocks * static_cast<int64_t>(sizeof(float));
  parallel(context, blocks, task_items(F::kWidth), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const float* const from = x + block * F::kWidth;
      uint8_t* const to = codes + block * F::kCodes;
      float scale;
      if constexpr (bits == 1) scale = quantize_signs<masked>(to, from, masked ? mask + block * F::kWidth : nullptr);
      else scale = quantize_integers<bits>(to, from);
      memcpy(message + block * static_cast<int64_t>(sizeof scale), &scale, sizeof scale);
    }
  });
}

template <int bits, bool masked>
void dequantize_all(float* x, const uint8_t* message, const uint8_t* mask, int64_t blocks, const void* context) {
  using F = Format<bits>;
  const uint8_t* const codes = message + blocks * static_cast<int64_t>(sizeof(float));
  parallel(context, blocks, task_items(F::kWidth), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      float scale;
      memcpy(&scale, message + block * static_cast<int64_t>(sizeof scale), sizeof scale);
      dequantize<bits, masked>(x + block * F::kWidth, codes + block * F::kCodes,
                               masked ? mask + block * F::kWidth : nullptr, scale);
    }
  });
}

}  // namespace

int quantize_blocks(void* message, const float* x, const void* mask, int64_t blocks, int bits, void* context) {
  const auto run = bits == 8         ? quantize_all<8, false>
                   : bits == 4       ? quantize_all<4, false>
                   : bits != 1       ? nullptr
                   : mask != nullptr ? quantize_all<1, true>
                                     : quantize_all<1, false>;
  if (run == nullptr) return GPTLITE_UNSUPPORTED;
  run(static_cast<uint8_t*>(message), x, static_cast<const uint8_t*>(mask), blocks, context);
  return 0;
}

int dequantize_blocks(float* x, const void* message, const void* mask, int64_t blocks, int bits, void* context) {
  const auto run = bits == 8         ? dequantize_all<8, false>
                   : bits == 4       ? dequantize_all<4, false>
                   : bits != 1       ? nullptr
                   : mask != nullptr ? dequantize_all<1, true>
                                     : dequantize_all<1, false>;
  if (run == nullptr) return GPTLITE_UNSUPPORTED;
  run(x, static_cast<const uint8_t*>(message), static_cast<const uint8_t*>(mask), blocks, context);
  return 0;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
