// Quantization of a matrix to fp8 with one scale, in one or both layouts: fp8 GEMMs need operands that are contiguous
// along the summed dimension.
//
// A block of 256 threads has a tile of 128 x 128 elements. A thread reads 16 columns of four rows, and writes 16 bytes
// per row. For the transpose, it turns blocks of 4 x 4 bytes in registers and writes words into shared memory, from where
// the block reads columns of 128 bytes. Traffic, the minimum: x is read once, each layout is written once.
#include "dtype.cuh"
#include "fp8.h"

namespace gptlite {
namespace {

constexpr int kSide = 128;      // rows and columns of a tile
constexpr int kColumns = 16;    // of a thread: the bytes of a store
constexpr int kRows = 4;        // of a thread: the bytes of a word of the transpose
constexpr int kAcross = kSide / kColumns;
constexpr int kThreads = kAcross * (kSide / kRows);
constexpr int kWords = kSide / 4;  // of a row of the transpose

struct Quantize {
  uint8_t* y;
  uint8_t* transposed;  // or NULL
  float* scale;
  const float* amax;
  int64_t rows;
  int64_t width;
  int64_t across;  // tiles
};

// x / scale, rounded as by a division: an approximation and two corrections, five instructions instead of the 10 to 20
// of a division; but -0 becomes 0. `inverse` is 1 / divisor, rounded.
__device__ __forceinline__ float quotient(float x, float divisor, float inverse) {
  float q = x * inverse;
  q = fmaf(fmaf(-q, divisor, x), inverse, q);
  return fmaf(fmaf(-q, divisor, x), inverse, q);
}

// Returns the bytes of `low` and `high`, in this order.
template <typename Format>
__device__ __forceinline__ uint32_t fp8_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (std::is_same<Format, E4m3>::value)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return fp8_bits<Format>(low) | fp8_bits<Format>(high) << 8;
#endif
}

// Returns the four bytes of a and b (0 to 3 of a, 4 to 7 of b) that the digits of `order` name, the lowest first.
__device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t order) {
#ifdef GPTLITE_EMU
  const uint64_t both = a | static_cast<uint64_t>(b) << 32;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(both >> (8 * (order >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  return word;
#else
  return __byte_perm(a, b, order);
#endif
}

// Turns a block of 4 x 4 bytes, whose rows are words.
__device__ __forceinline__ void turn(uint32_t (&word)[4]) {
  const uint32_t even01 = bytes_of(word[0], word[1], 0x6240), odd01 = bytes_of(word[0], word[1], 0x7351);
  const uint32_t even23 = bytes_of(word[2], word[3], 0x6240), odd23 = bytes_of(word[2], word[3], 0x7351);
  word[0] = bytes_of(even01, even23, 0x5410), word[1] = bytes_of(odd01, odd23, 0x5410);
  word[2] = bytes_of(even01, even23, 0x7632), word[3] = bytes_of(odd01, odd23, 0x7632);
}

// Loads 16 columns of a row. Packed: the row's width is a multiple of 16, and `count` is 0 or at least 16.
template <typename T, bool Packed>
__device__ __forceinline__ void load_columns(Pack<T, kColumns>& pack, const T* at, int64_t count) {
  if constexpr (Packed) {
    if (count > 0) pack = load_pack<kColumns>(at);
  } else {
    float v[kColumns] = {};
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (k < count) v[k] = to_float(at[k]);
    pack = Pack<T, kColumns>::of(v);
  }
}

// Stores up to 16 bytes.
template <bool Packed>
__device__ __forceinline__ void store_bytes(uint8_t* at, const uint32_t* word, int64_t count) {
  if constexpr (Packed) {
    if (count > 0) store_words(at, word);
  } else {
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (k < count) at[k] = static_cast<uint8_t>(word[k / 4] >> (8 * (k % 4)));
  }
}

// Grid: one block per tile. Packed: pointers are aligned to 16 bytes, rows and width are multiples of 16.
template <typename T, typename Format, bool Packed>
__global__ void __launch_bounds__(kThreads) quantize_kernel(Quantize q, const T* x) {
  GPTLITE_SHARED(uint32_t, shared);  // [128 columns][32 words]
  const int group = static_cast<int>(threadIdx.x) % kAcross, strip = static_cast<int>(threadIdx.x) / kAcross;
  const int64_t tile = blockIdx.x / static_cast<uint32_t>(q.across), left = blockIdx.x % static_cast<uint32_t>(q.across);
  const int64_t row = tile * kSide + strip * kRows, column = left * kSide + group * kColumns;
  Pack<T, kColumns> packs[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    load_columns<T, Packed>(packs[i], x + (row + i) * q.width + column, row + i < q.rows ? q.width - column : 0);
  const float amax = *q.amax, scale = (amax < kSmallestAmax ? kSmallestAmax : amax) / Format::kLargest;
  if (blockIdx.x == 0 && threadIdx.x == 0) *q.scale = scale;
  // With an infinite scale, 0 as divisor and inverse gives what a division gives: 0, or NaN for infinity.
  const float inverse = 1.0f / scale, divisor = inverse == 0.0f ? 0.0f : scale;
  uint32_t word[kRows][kColumns / 4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns / 4; ++j) {
      float v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = quotient(packs[i].at(4 * j + k), divisor, inverse);
      word[i][j] = fp8_pair<Format>(v[0], v[1]) | fp8_pair<Format>(v[2], v[3]) << 16;
    }
    store_bytes<Packed>(q.y + (row + i) * q.width + column, word[i], row + i < q.rows ? q.width - column : 0);
  }
  if (q.transposed == nullptr) return;
  // The word of column c and strip s is at s ^ 4 (c / 16), which avoids bank conflicts of both accesses.
#pragma unroll
  for (int j = 0; j < kColumns / 4; ++j) {
    uint32_t block[4] = {word[0][j], word[1][j], word[2][j], word[3][j]};
    turn(block);
#pragma unroll
    for (int k = 0; k < 4; ++k) shared[(group * kColumns + 4 * j + k) * kWords + (strip ^ 4 * group)] = block[k];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSide / (kThreads / kAcross); ++i) {
    const int c = strip + i * (kThreads / kAcross);
    const int64_t at = left * kSide + c, first = tile * kSide + group * kColumns;
    const uint4 bits = *reinterpret_cast<const uint4*>(shared + c * kWords + 4 * (group ^ c / kColumns));
    const uint32_t out[4] = {bits.x, bits.y, bits.z, bits.w};
    store_bytes<Packed>(q.transposed + at * q.rows + first, out, at < q.width ? q.rows - first : 0);
  }
}

template <typename T, typename Format>
int quantize(const Quantize& q, const T* x, void* stream) {
  const int64_t blocks = q.across * divide_up(q.rows, kSide);
  const int64_t shared = q.transposed == nullptr ? 0 : kSide * kSide;
  const bool turned = q.transposed == nullptr || q.rows % kColumns == 0;
  return q.width % kColumns == 0 && turned && aligned(q.y, q.transposed, x)
             ? launch(quantize_kernel<T, Format, true>, blocks, kThreads, shared, stream, q, x)
             : launch(quantize_kernel<T, Format, false>, blocks, kThreads, shared, stream, q, x);
}

}  // namespace
}  // namespace gptlite

int gptlite_cuda_quantize_fp8(void* y, void* transposed, float* scale, const void* x, const float* amax, int64_t rows,
                              int64_t width, int e5m2, int dtype, void* stream) {
  using namespace gptlite;
  const Quantize q = {static_cast<uint8_t*>(y), static_cast<uint8_t*>(transposed), scale, amax, rows, width,
                      divide_up(width, kSide)};
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const T* in = static_cast<const T*>(x);
    return e5m2 ? quantize<T, E5m2>(q, in, stream) : quantize<T, E4m3>(q, in, stream);
  });
}
