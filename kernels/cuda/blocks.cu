// Blockwise quantization of fp32 to 8, 4 or 1 bits.
//
// A warp has a block. A lane has packs of four neighbouring values, 128 values apart, of which the codes of 4 or 1 bits
// fill one word. Traffic: x is read once and the message is written once, or the other way, the minimum.
#include "reduce.cuh"
#include "row.cuh"

namespace gptlite {
namespace {

constexpr int kQuad = 4;                // values of a pack
constexpr int kStride = kWarp * kQuad;  // from a lane's pack to its next one
// 1.5 * 2^23. A float below 2^22 plus this has its integer, rounded to even, in the low bits.
constexpr float kToInteger = 12582912.0f;

template <int bits>
struct Format {
  static constexpr int kPacks = bits == 1 ? 8 : 2;  // of a lane
  static constexpr int kWidth = kPacks * kStride;
  static constexpr int kCodes = kWidth * bits / 8;  // bytes of a block
  static constexpr int kWords = bits == 8 ? kPacks : 1;
  static constexpr float kMost = static_cast<float>((1 << (bits - 1)) - 1);
};

// Replaces infinity and any NaN by the same NaN.
__device__ __forceinline__ float finite_or_nan(float scale) {
  return scale <= 3.402823466e38f ? scale : __uint_as_float(0x7fc00000u);
}

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Returns max |x| / most of a block. As bit patterns, so that NaN is above infinity.
template <int bits>
__device__ __forceinline__ float integer_scale(const float (&v)[Format<bits>::kPacks][kQuad]) {
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < Format<bits>::kPacks; ++j) {
#pragma unroll
    for (int c = 0; c < kQuad; ++c) largest = max(largest, magnitude(v[j][c]));
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  return finite_or_nan(__uint_as_float(largest) / Format<bits>::kMost);
}

// Returns the mean of |x| over the values that keep[j] has a byte for. The sum is made by halves of the block.
__device__ __forceinline__ float sign_scale(const float (&v)[8][kQuad], const uint32_t (&keep)[8]) {
  float sums[8][kQuad];
  int count = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
      const bool kept = keep[j] >> (8 * c) & 0xffu;
      // x * 0 is 0 for what ought to be zero, and NaN for what is not finite.
      sums[j][c] = kept ? __uint_as_float(magnitude(v[j][c])) : v[j][c] * 0.0f;
      count += kept;
    }
  }
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) {
#pragma unroll
      for (int c = 0; c < kQuad; ++c) sums[j][c] += sums[j + half][c];
    }
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int c = 0; c < kQuad; ++c) sums[0][c] += __shfl_xor_sync(kAllLanes, sums[0][c], offset);
    count += __shfl_xor_sync(kAllLanes, count, offset);
  }
  const float sum = (sums[0][0] + sums[0][2]) + (sums[0][1] + sums[0][3]);
  return finite_or_nan(sum / static_cast<float>(count > 0 ? count : 1));
}

__device__ __forceinline__ uint32_t rounded(float value, float scale, float most) {
  return __float_as_uint(fminf(fmaxf(value / scale, -most), most) + kToInteger);
}

// Returns a byte for each value of a pack.
template <int V>
__device__ __forceinline__ uint32_t load_mask(const uint8_t* mask, int64_t at) {
  if (mask == nullptr) return 0x01010101u;
  if constexpr (V == kQuad) return *reinterpret_cast<const uint32_t*>(mask + at);
  uint32_t bytes = 0;
#pragma unroll
  for (int c = 0; c < kQuad; ++c) bytes |= static_cast<uint32_t>(mask[at + c]) << (8 * c);
  return bytes;
}

// V: values that one instruction loads or stores, 4 if x and the mask are aligned to packs, else 1.
template <int bits, int V>
__global__ void __launch_bounds__(kRowBlock)
    quantize_kernel(float* scales, uint8_t* codes, const float* x, const uint8_t* mask, int64_t blocks) {
  using F = Format<bits>;
  const RowThread at(kWarp);
  if (at.row >= blocks) return;  // the whole warp
  const int64_t start = at.row * F::kWidth + at.lane * kQuad;
  float v[F::kPacks][kQuad];
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
#pragma unroll
    for (int c = 0; c < kQuad; c += V) load_floats<V>(v[j] + c, x + start + j * kStride + c);
  }
  uint32_t words[F::kWords] = {}, keep[F::kPacks];
  float scale;
  if constexpr (bits == 1) {
#pragma unroll
    for (int j = 0; j < F::kPacks; ++j) keep[j] = load_mask<V>(mask, start + j * kStride);
    scale = sign_scale(v, keep);
  } else {
    scale = integer_scale<bits>(v);
  }
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
      if constexpr (bits == 1) {
        if (v[j][c] < 0 && (keep[j] >> (8 * c) & 0xffu)) words[0] |= 1u << (8 * c + j);
      } else if (scale > 0) {
        const uint32_t code = rounded(v[j][c], scale, F::kMost) & ((1u << bits) - 1);
        words[j % F::kWords] |= code << (8 * c + (bits == 4 ? 4 * j : 0));
      }
    }
  }
  uint32_t* const out = reinterpret_cast<uint32_t*>(codes + at.row * F::kCodes) + at.lane;
#pragma unroll
  for (int w = 0; w < F::kWords; ++w) out[w * kWarp] = words[w];
  if (at.lane == 0) scales[at.row] = scale;
}

template <int bits, int V>
__global__ void __launch_bounds__(kRowBlock)
    dequantize_kernel(float* x, const float* scales, const uint8_t* codes, const uint8_t* mask, int64_t blocks) {
  using F = Format<bits>;
  const RowThread at(kWarp);
  if (at.row >= blocks) return;
  const int64_t start = at.row * F::kWidth + at.lane * kQuad;
  const float scale = scales[at.row];
  const uint32_t* const in = reinterpret_cast<const uint32_t*>(codes + at.row * F::kCodes) + at.lane;
  uint32_t words[F::kWords];
#pragma unroll
  for (int w = 0; w < F::kWords; ++w) words[w] = in[w * kWarp];
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    uint32_t keep = 0;
    if constexpr (bits == 1) keep = load_mask<V>(mask, start + j * kStride);
    float v[kQuad];
#pragma unroll
    for (int c = 0; c < kQuad; ++c) {
      int code;
      if constexpr (bits == 1) {
        code = keep >> (8 * c) & 0xffu ? 1 - 2 * static_cast<int>(words[0] >> (8 * c + j) & 1u) : 0;
      } else {
        constexpr int kSign = 1 << (bits - 1);
        const uint32_t raw = words[j % F::kWords] >> (8 * c + (bits == 4 ? 4 * j : 0)) & ((1u << bits) - 1);
        code = (static_cast<int>(raw) ^ kSign) - kSign;  // two's complement
      }
      v[c] = static_cast<float>(code) * scale;  // NaN if the scale is, for 0 too
    }
#pragma unroll
    for (int c = 0; c < kQuad; c += V) store_floats<V>(x + start + j * kStride + c, v + c);
  }
}

// Calls f(bits, V) with compile-time numbers.
template <typename F>
int by_format(int bits, bool packs, F f) {
  const auto with = [&](auto number) {
    return packs ? f(number, std::integral_constant<int, kQuad>{}) : f(number, std::integral_constant<int, 1>{});
  };
  switch (bits) {
    case 8:
      return with(std::integral_constant<int, 8>{});
    case 4:
      return with(std::integral_constant<int, 4>{});
    case 1:
      return with(std::integral_constant<int, 1>{});
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_quantize_blocks(void* message, const float* x, const void* mask, int64_t blocks, int bits,
                                 void* stream) {
  using namespace gptlite;
  return by_format(bits, aligned(x, mask), [&](auto number, auto pack) {
    float* const scales = static_cast<float*>(message);
    return launch(quantize_kernel<decltype(number)::value, decltype(pack)::value>, divide_up(blocks, kRowBlock / kWarp),
                  kRowBlock, 0, stream, scales, reinterpret_cast<uint8_t*>(scales + blocks), x,
                  static_cast<const uint8_t*>(mask), blocks);
  });
}

int gptlite_cuda_dequantize_blocks(float* x, const void* message, const void* mask, int64_t blocks, int bits,
                                   void* stream) {
  using namespace gptlite;
  return by_format(bits, aligned(x, mask), [&](auto number, auto pack) {
    const float* const scales = static_cast<const float*>(message);
    return launch(dequantize_kernel<decltype(number)::value, decltype(pack)::value>,
                  divide_up(blocks, kRowBlock / kWarp), kRowBlock, 0, stream, x, scales,
                  reinterpret_cast<const uint8_t*>(scales + blocks), static_cast<const uint8_t*>(mask), blocks);
  });
}
