// Gradients of a linear layer in bf16: dw = dyᵀ x, and dbias, the sum of dy over rows. A task computes one block of dw.
// It loops over panels of kDepth rows. For each panel, the operands are packed into tiles that stay in the L2 cache: dy
// transposed, x in pairs of rows. `Dot` multiplies the tiles: Tiles (AMX) or PairDots (AVX512-BF16, or BF16 of ARM).
#pragma once

#include <string.h>

#include <atomic>

#include "attention.h"
#include "attention_transpose.h"
#include "lanes_bf16.h"
#include "parallel.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr int64_t kTile = 512;   // elements: 16 columns of 32 rows
constexpr int64_t kDepth = 256;  // rows of a panel
constexpr int64_t kSide = 384;   // maximum columns of an operand per task, to fit a 2 MB cache

struct Block {
  int64_t first, count, padded;
};

static inline Block block_at(int64_t index, int64_t size, int64_t total) {
  const int64_t first = index * size, count = smaller(size, total - first);
  return {first, count, round_up(count, 32)};
}

GPTLITE_INLINE Elements load_row(const uint16_t* rows, int64_t stride, int64_t row, int64_t count, Part part) {
  return row < count ? load_elements(rows + row * stride, part) : Elements{};
}

// Packs a square of 32 rows and 32 columns of dy into two left tiles [16 columns, 32 rows]. Adds the column sums to
// `sums` unless it is NULL. Rows from `count` on are zeros, and so are columns from `width` on.
GPTLITE_INLINE void pack_left(uint16_t* upper, uint16_t* lower, const uint16_t* from, int64_t stride, int64_t count,
                              int64_t width, float* sums) {
  alignas(64) float rows[32 * 16], pairs[16 * 32];
  uint16_t* const elements = reinterpret_cast<uint16_t*>(rows);
  for (int column = 0; column < 32; column += kElements) {
    const Part part = part_of(width - column);
    for (int row = 0; row < 32; ++row) {
      store_elements(elements + 32 * row + column, load_row(from + column, stride, row, count, part));
    }
  }
  for (int column = 0; sums != nullptr && column < 32; column += kLanes) {
    Vec total = load(sums + column, All{});
    for (int row = 0; row < 32; ++row) {
      total += load(reinterpret_cast<const Bf16*>(elements + 32 * row + column), All{});
    }
    store(sums + column, total, All{});
  }
  transpose(pairs, 32, rows, 16, 32, 16);
#pragma GCC unroll 16
  for (int pair = 0; pair < 16; ++pair) {
    uint16_t* const to = (pair < 8 ? upper : lower) + 64 * (pair % 8);
    for (int row = 0; row < 32; row += kElements) {
      const Elements a = load_elements(pairs + 32 * pair + row), b = load_elements(pairs + 32 * pair + row + kLanes);
      store_elements(to + row, evens(a, b));
      store_elements(to + 32 + row, odds(a, b));
    }
  }
}

// Packs a square of 32 rows and 32 columns of x into two right tiles [16 pairs of rows, 16 columns].
GPTLITE_INLINE void pack_right(uint16_t* left, uint16_t* right, const uint16_t* from, int64_t stride, int64_t count,
                               int64_t width, float*) {
  for (int column = 0; column < 32; column += kElements) {
    const Part part = part_of(width - column);
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const Elements a = load_row(from + column, stride, 2 * pair, count, part);
      const Elements b = load_row(from + column, stride, 2 * pair + 1, count, part);
      // The first 16 columns are those of the left tile. If a vector has all 32, its halves go to both tiles.
      uint16_t* const to = (column < 16 ? left : right) + 32 * pair + 2 * (column % 16);
      store_elements(to, interleaved_low(a, b));
      store_elements(kElements == 32 ? right + 32 * pair : to + kElements, interleaved_high(a, b));
    }
  }
}

// Packs all columns of a block in a panel of rows. For each 16 columns, the tiles of the whole panel are contiguous.
template <class Pack>
void pack(uint16_t* to, const uint16_t* from, int64_t stride, const Block& rows, const Block& columns, float* sums,
          Pack square) {
  const int64_t column_tiles = rows.padded / 32 * kTile;
  for (int64_t row = 0; row < rows.padded; row += 32) {
    const uint16_t* const line = from + (rows.first + row) * stride + columns.first;
    for (int64_t column = 0; column < columns.padded; column += 32) {
      uint16_t* const tile = to + column / 16 * column_tiles + row / 32 * kTile;
      square(tile, tile + column_tiles, line + column, stride, rows.count - row, columns.count - column,
             sums == nullptr ? nullptr : sums + column);
    }
  }
}

// Prefetch of a block's columns in the next panel into the L2 cache. Each call of draw() fetches an equal share of the
// cache lines, so that `calls` calls fetch all.
class Coming {
 public:
  Coming(const uint16_t* from, int64_t stride, int64_t row, int64_t rows, const Block& columns, int64_t calls)
      : at_(from + row * stride + columns.first),
        stride_(stride),
        lines_((columns.count + 31) / 32),
        count_(lines_ * rows),
        each_(calls > 0 ? (count_ + calls - 1) / calls : 0) {}

  void draw() {
    const int64_t end = smaller(drawn_ + each_, count_);
    for (; drawn_ < end; ++drawn_) __builtin_prefetch(at_ + drawn_ / lines_ * stride_ + drawn_ % lines_ * 32, 0, 2);
  }

 private:
  const uint16_t* at_;
  int64_t stride_, lines_, count_, each_, drawn_ = 0;
};

// Store `count` sums, rounded to bf16, as bf16 or as fp32.
static inline void store_rounded(uint16_t* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kElements) {
    store_elements(to + i, rounded(load(from + i, All{}), load(from + i + kLanes, All{})), part_of(count - i));
  }
}
static inline void store_rounded(float* to, const float* from, int64_t count) {
  for_columns<1>(count, [&](int64_t i, auto, auto lanes) GPTLITE_LAMBDA {
    store(to + i, rounded(load(from + i, lanes)), lanes);
  });
}

template <class Out>
struct Problem {
  Out *dw, *dbias;
  const uint16_t *dy, *x;
  int64_t rows, outputs, inputs;
};

struct Workspace {
  uint16_t *left, *right;
  float *sums, *bias_sums;

  Workspace(int64_t height, int64_t width) { take(height, width); }
  Workspace(int64_t height, int64_t width, int64_t bytes) : scratch_(bytes) { take(height, width); }
  int64_t bytes() const { return scratch_.bytes(); }
  bool empty() const { return scratch_.empty(); }

 private:
  void take(int64_t height, int64_t width) {
    scratch_.take(left, height * kDepth);
    scratch_.take(right, width * kDepth);
    scratch_.take(sums, height * width);
    scratch_.take(bias_sums, height);
  }
  Scratch scratch_;
};

// Computes one block of dw. The blocks of the first inputs also compute dbias.
template <class Dot, class Out>
void make_block(const Problem<Out>& of, const Block& outputs, const Block& inputs, const Workspace& room) {
  const int64_t products = outputs.padded / 32 * (inputs.padded / 32);
  float* const bias_sums = of.dbias != nullptr && inputs.first == 0 ? room.bias_sums : nullptr;
  if (bias_sums != nullptr) memset(bias_sums, 0, outputs.padded * sizeof *bias_sums);
  if (of.rows == 0) memset(room.sums, 0, outputs.padded * inputs.padded * sizeof *room.sums);
  for (int64_t row = 0; row < of.rows; row += kDepth) {
    const int64_t count = smaller(kDepth, of.rows - row), after = row + count;
    const Block panel{row, count, round_up(count, 32)};
    const int64_t tiles = panel.padded / 32 * kTile;  // elements of 16 columns
    pack(room.left, of.dy, of.outputs, panel, outputs, bias_sums, pack_left);
    pack(room.right, of.x, of.inputs, panel, inputs, nullptr, pack_right);
    const int64_t coming = smaller(kDepth, of.rows - after);
    Coming next_dy(of.dy, of.outputs, after, coming, outputs, products);
    Coming next_x(of.x, of.inputs, after, coming, inputs, products);
    for (int64_t output = 0; output < outputs.padded; output += 32) {
      for (int64_t input = 0; input < inputs.padded; input += 32) {
        Dot::multiply_packed(room.sums + output * inputs.padded + input, inputs.padded, room.left + output / 16 * tiles,
                             room.right + input / 16 * tiles, tiles, panel.padded, row > 0);
        next_dy.draw();
        next_x.draw();
      }
    }
  }
  for (int64_t output = 0; output < outputs.count; ++output) {
    Out* const to = of.dw + (outputs.first + output) * of.inputs + inputs.first;
    store_rounded(to, room.sums + output * inputs.padded, inputs.count);
  }
  if (bias_sums != nullptr) store_rounded(of.dbias + outputs.first, bias_sums, outputs.count);
}

// Division of dw into down * across blocks of at most kSide by kSide. The number of blocks is a multiple of the number
// of threads, if the blocks do not become too small for that.
struct Cut {
  int64_t down, across, height, width;
};

static inline Cut cut_of(int64_t outputs, int64_t inputs, int64_t threads) {
  const int64_t least = 96;
  int64_t down = outputs > 0 ? (outputs + kSide - 1) / kSide : 1, across = inputs > 0 ? (inputs + kSide - 1) / kSide : 1;
  while (down * across % threads != 0 && down * across < 8 * threads) {
    const bool taller = outputs * across >= inputs * down;
    int64_t& pieces = taller ? down : across;
    if ((taller ? outputs : inputs) / (pieces + 1) < least) break;
    ++pieces;
  }
  return {down, across, round_up((outputs + down - 1) / down, 32), round_up((inputs + across - 1) / across, 32)};
}

template <class Dot, class Out>
int make_blocks(const Problem<Out>& problem, int64_t threads, void* context) {
  const Cut cut = cut_of(problem.outputs, problem.inputs, threads);
  std::atomic<int> status{0};
  parallel(context, cut.down * cut.across, 1, [&](int64_t first, int64_t last) {
    Workspace sizes(cut.height, cut.width), room(cut.height, cut.width, sizes.bytes());
    if (room.empty()) {
      status = kOutOfMemory;
      return;
    }
    [[maybe_unused]] Dot registers;
    for (int64_t task = first; task < last; ++task) {
      make_block<Dot>(problem, block_at(task / cut.across, cut.height, problem.outputs),
                 block_at(task % cut.across, cut.width, problem.inputs), room);
    }
  });
  return status;
}

template <class Dot>
int weight_gradient_by_blocks(void* dw, void* dbias, const void* dy, const void* x, int64_t rows, int64_t outputs,
                              int64_t inputs, int dtype, int out_dtype, int64_t threads, void* context) {
  if (dtype != GPTLITE_BF16) return GPTLITE_UNSUPPORTED;
  const auto with = [&](auto out) {
    using Out = decltype(out);
    return make_blocks<Dot, Out>({static_cast<Out*>(dw), static_cast<Out*>(dbias), static_cast<const uint16_t*>(dy),
                                  static_cast<const uint16_t*>(x), rows, outputs, inputs},
                                 threads, context);
  };
  return out_dtype == GPTLITE_FP32 ? with(float{}) : out_dtype == GPTLITE_BF16 ? with(uint16_t{}) : GPTLITE_UNSUPPORTED;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
