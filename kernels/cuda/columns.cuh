// Column sums of a [rows, width] matrix, such as the gradient of a bias, in two stages and a fixed order: each block
// writes a partial sum (a "part") to the workspace, and a second kernel (column_sums.cu) adds the parts. Also the grid
// of kernels that loop down the columns of a matrix.
#pragma once

#include "dtype.cuh"

namespace gptlite {

constexpr int64_t kMaxParts = 256;  // per sum; gptlite_rows_workspace has room for so many
constexpr int kMaxSums = 3;

// Arguments of add_parts, for up to three sums. `parts` holds one matrix [count, width] of parts per sum, in order. Sum
// i is written to out[i] [width], of `dtype`, unless out[i] is NULL. With count 0, the sums are zeros.
struct ColumnSums {
  void* out[kMaxSums];
  const float* parts;
  int64_t count;
  int64_t width;
  int dtype;
};

int add_parts(const ColumnSums& sums, void* stream);

// Grid of blocks of across * down threads. A block covers `across` packs of columns and `down` rows at a time. A thread
// stays in the columns of its pack and advances down the rows.
struct ColumnGrid {
  int across;
  int down;
  int64_t tiles;   // ranges of columns
  int64_t chunks;  // sets of rows: from chunk * down + i in steps of chunks * down

  int block() const { return across * down; }
  int64_t blocks() const { return tiles * chunks; }
};

constexpr int kColumnBlock = 256;
constexpr int kRowsAtOnce = 4;  // rows that a thread loads before it uses them

// Returns the grid for a matrix [rows, width] in packs of `elements`, with at most `most` chunks. There are no more
// chunks than give each thread kRowsAtOnce rows.
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

// Position of a thread in the grid: its first column and row, and the distance to its next row.
struct ColumnThread {
  int64_t column;  // first column of the thread's pack
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

// Adds up the sums of threads with the same V columns, and writes the block's part. `shared` has V floats per thread.
template <int V>
__device__ __forceinline__ void store_part(float* parts, const float* sum, const ColumnGrid& grid,
                                           const ColumnThread& at, int64_t width, float* shared) {
  const int threads = grid.across * grid.down;
  __syncthreads();  // until the previous sum has been read from `shared`
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
