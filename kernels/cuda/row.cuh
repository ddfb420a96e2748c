// Assignment of rows to threads, shared by the softmax, norm, dropout and RoPE kernels.
//
// Held rows: a row of up to 8192 elements (4096 if it is not aligned to packs) stays in registers. Each of the row's
// `threads` threads holds packs lane, lane + threads, lane + 2 threads, ..., `E` elements in total. Up to a width of
// 1024 (256 if not aligned), a row takes a warp or less, and a block of 128 threads has several rows, so no thread
// waits for another warp. A wider row takes a block of as few threads as can hold it. A multiprocessor then runs many
// blocks, and reads one row while it reduces another.
//
// Long rows: a block of 512 threads loops over the row, and reads it twice.
#pragma once

#include "dtype.cuh"
#include "reduce.cuh"

namespace gptlite {

constexpr int64_t kHeldWidth = 8192;   // width of the widest held row
constexpr int64_t kHeldSingly = 4096;  // the same without packs, where each element needs a register and an address
constexpr int kRowBlock = 128;         // threads of a block with several rows
constexpr int kLongBlock = 512;        // threads of a block with one long row, the maximum of the row kernels
constexpr int kMaxWarps = kLongBlock / kWarp;

// Number of threads in the largest block of a kernel, for __launch_bounds__.
template <int E>
constexpr int kMostThreads = E > 16 ? kRowBlock : kLongBlock;

// V: elements of a pack. E: elements of a row that a thread holds, or 0 for long rows.
template <int V_, int E_>
struct Layout {
  static constexpr int V = V_;
  static constexpr int E = E_;
};

// Calls f with the Layout for rows of `width`, in packs of 16 bytes if `packs`, else of one element.
template <typename T, typename F>
int by_layout(bool packs, int64_t width, F f) {
  constexpr int V = kFullPack<T>;
  if (!packs) return width > kHeldSingly ? f(Layout<1, 0>{}) : f(Layout<1, 8>{});
  if (width > kHeldWidth) return f(Layout<V, 0>{});
  if (width > 16 * kWarp && width <= 24 * kWarp) return f(Layout<V, 24>{});
  if (width > 24 * kWarp && width <= 32 * kWarp) return f(Layout<V, 32>{});
  return f(Layout<V, 16>{});
}

// Returns whether contiguous rows of `width` elements can be read in packs, if the first row is aligned.
template <typename T>
bool rows_in_packs(int64_t width) {
  return width % kFullPack<T> == 0;
}

// Returns the number of threads for a row of `width` if each holds `elements`: a power of two up to a warp, or a
// multiple of a warp. `elements` is 0 for long rows.
inline int row_threads(int64_t width, int elements) {
  if (elements == 0) return kLongBlock;
  const int64_t threads = divide_up(width, elements);
  if (threads > kWarp) return static_cast<int>(divide_up(threads, kWarp) * kWarp);
  int power = 1;
  while (power < threads) power *= 2;
  return power;
}

struct RowGrid {
  int threads;  // per row
  int block;
  int64_t blocks;
};

inline RowGrid row_grid(int64_t rows, int64_t width, int elements) {
  const int threads = row_threads(width, elements), block = threads > kWarp ? threads : kRowBlock;
  return RowGrid{threads, block, divide_up(rows, block / threads)};
}

// Row and lane of a thread. In the last block, `row` may be past the last row. Kernels with a reduction treat such a
// row as one of width 0, because all threads of the block must take part.
struct RowThread {
  int64_t row;
  int threads;
  int lane;

  __device__ __forceinline__ explicit RowThread(int threads_)
      : row(static_cast<int64_t>(blockIdx.x) * (blockDim.x / threads_) + threadIdx.x / threads_),
        threads(threads_),
        lane(static_cast<int>(threadIdx.x) % threads_) {}
};

// Computes a / b and a % b, in 32 bits if both fit, because a 64-bit division takes 100 instructions.
__device__ __forceinline__ void divide(int64_t a, int64_t b, int64_t* quotient, int64_t* remainder) {
  if (((a | b) >> 32) == 0) {
    *quotient = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    *remainder = static_cast<uint32_t>(a) % static_cast<uint32_t>(b);
  } else {
    *quotient = a / b;
    *remainder = a % b;
  }
}

}  // namespace gptlite
