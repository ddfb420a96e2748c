// Sums over rows, column by column, in two stages and a fixed order: blocks leave parts in the workspace, another
// kernel adds the parts up. And the walk down the columns of a matrix, where that is all a kernel does.
#pragma once

#include "dtype.cuh"

namespace gptlite {

constexpr int64_t kMaxParts = 256;  // of a sum; as gptlite_rows_workspace has room for
constexpr int kMaxSums = 3;

// One matrix of parts [parts, width] for each sum, one after the other; out[i] [width] of `dtype`, or NULL: not wanted.
// No parts: zeros.
struct ColumnSums {
  void* out[kMaxSums];
  const float* parts;
  int64_t count;
  int64_t width;
  int dtype;
};

int add_parts(const ColumnSums& sums, void* stream);

// A block walks down `across` packs of columns, `down` rows at a time; a thread keeps to its columns.
struct ColumnGrid {
  int across;
  int down;
  int64_t tiles;   // side by side
  int64_t chunks;  // one under the other: rows chunk * down + i, step chunks * down

  int block() const { return across * down; }
  int64_t blocks() const { return tiles * chunks; }
};

constexpr int kColumnBlock = 256;
constexpr int kRowsAtOnce = 4;  // rows a thread loads before it uses them

// At most `most` chunks, and no more than there are rows.
inline ColumnGrid column_grid(int64_t rows, int64_t width, int elements, int64_t most) {
  const int64_t packs = divide_up(width, elements);
  ColumnGrid grid = {};
  if (packs == 0) return grid;
  grid.tiles = divide_up(packs, kColumnBlock);
  grid.across = static_cast<int>(divide_up(packs, grid.tiles));
  grid.down = kColumnBlock / grid.across;
  const int64_t room = kMaxGrid / grid.tiles, chunks = divide_up(rows, grid.down * kRowsAtOnce);
  most = most < room ? most : room;
  grid.chunks = chunks < most ? chunks : most;
  return grid;
}

// A thread's place in it.
struct ColumnThread {
  int64_t column;  // the first of its pack
  int64_t row;
  int64_t step;
  int64_t chunk;
  int down;

  __device__ __forceinline__ ColumnThread(const ColumnGrid& grid, int elements) {
    const int64_t tile = blockIdx.x % static_cast<uint32_t>(grid.tiles);
    chunk = blockIdx.x / static_cast<uint32_t>(grid.tiles);
    down = static_cast<int>(threadIdx.x) / grid.across;
    column = (tile * grid.across + static_cast<int>(threadIdx.x) % grid.across) * elements;
    row = chunk * grid.down + down;
    step = grid.chunks * grid.down;
  }
};

// Writes the block's part of a sum, of each thread's V columns: adds up the rows of threads. `shared`: V floats a
// thread.
template <int V>
__device__ __forceinline__ void store_part(float* parts, const float* sum, const ColumnGrid& grid,
                                           const ColumnThread& at, int64_t width, float* shared) {
  const int threads = grid.across * grid.down;
  __syncthreads();  // the part before is read
#pragma unroll
  for (int k = 0; k < V; ++k) shared[k * threads + threadIdx.x] = sum[k];
  __syncthreads();
  if (at.down != 0 || at.column >= width) return;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    float total = 0.0f;
    for (int i = 0; i < grid.down; ++i) total += shared[k * threads + i * grid.across + threadIdx.x];
    parts[at.chunk * width + at.column + k] = total;
  }
}

}  // namespace gptlite
