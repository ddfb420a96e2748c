// How rows are laid over threads.
//
// A row of up to 8192 elements (4096 where it isn't aligned to packs) is held in registers: each thread has packs lane,
// lane + threads, lane + 2 threads, .. of it, `E` elements in all. Up to 1024 wide, a warp or a part of it has a row
// and blocks have several; no thread waits for another warp there. Beyond, a block has a row, of as few threads as can
// hold it, so that a processor has many rows in flight, one being read while another is reduced. Longer rows are walked
// by a block of 512 threads, and read twice.
#pragma once

#include "dtype.cuh"
#include "reduce.cuh"

namespace gptlite {

constexpr int64_t kHeldWidth = 8192;   // the widest row held
constexpr int64_t kHeldSingly = 4096;  // element by element: each has a register and an address
constexpr int kRowBlock = 128;         // threads of a block of several rows
constexpr int kLongBlock = 512;        // of a block that walks a row; the most of any row kernel
constexpr int kMaxWarps = kLongBlock / kWarp;

// Threads of a kernel's largest block, for __launch_bounds__.
template <int E>
constexpr int kMostThreads = E > 16 ? kRowBlock : kLongBlock;

// V elements a pack; E elements a thread, 0 where rows are walked.
template <int V_, int E_>
struct Layout {
  static constexpr int V = V_;
  static constexpr int E = E_;
};

// f(Layout) for rows of `width`, in packs of 16 bytes or of one element.
template <typename T, typename F>
int by_layout(bool packs, int64_t width, F f) {
  constexpr int V = kFullPack<T>;
  if (!packs) return width > kHeldSingly ? f(Layout<1, 0>{}) : f(Layout<1, 8>{});
  if (width > kHeldWidth) return f(Layout<V, 0>{});
  if (width > 16 * kWarp && width <= 24 * kWarp) return f(Layout<V, 24>{});
  if (width > 24 * kWarp && width <= 32 * kWarp) return f(Layout<V, 32>{});
  return f(Layout<V, 16>{});
}

// Whether rows of `width` elements, one after the other from aligned pointers on, can be read in packs.
template <typename T>
bool rows_in_packs(int64_t width) {
  return width % kFullPack<T> == 0;
}

// Threads for one row of `width`, each with `elements`.
inline int row_threads(int64_t width, int elements) {
  if (elements == 0) return kLongBlock;
  const int64_t threads = divide_up(width, elements);
  if (threads > kWarp) return static_cast<int>(divide_up(threads, kWarp) * kWarp);
  int power = 1;
  while (power < threads) power *= 2;
  return power;
}

struct RowGrid {
  int threads;  // of a row
  int block;
  int64_t blocks;
};

inline RowGrid row_grid(int64_t rows, int64_t width, int elements) {
  const int threads = row_threads(width, elements), block = threads > kWarp ? threads : kRowBlock;
  return RowGrid{threads, block, divide_up(rows, block / threads)};
}

// A thread's place. Of the last block's groups some may have no row: they go along, with width 0.
struct RowThread {
  int64_t row;
  int threads;
  int lane;

  __device__ __forceinline__ explicit RowThread(int threads_)
      : row(static_cast<int64_t>(blockIdx.x) * (blockDim.x / threads_) + threadIdx.x / threads_),
        threads(threads_),
        lane(static_cast<int>(threadIdx.x) % threads_) {}
};

// a / b and a % b: 64-bit division takes 100 instructions.
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
