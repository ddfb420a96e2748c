// Matrix products of fp32 for attention_blocks.h. Inputs of any dtype are converted to fp32, and each product is
// computed by FMAs on a tile of vector registers.
#pragma once

#include <stdint.h>

#include "attention.h"
#include "attention_rows.h"
#include "attention_transpose.h"
#include "exp2.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

struct Fp32Math {
  using Element = float;
  struct Unit {};
  // Left operand of a product. Element (row, depth) is at data[row * row_stride + depth * depth_stride].
  struct Left {
    const float* data;
    int64_t row_stride, depth_stride;
  };
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 vector registers
  static constexpr int kTileRows = 8;
#else
  static constexpr int kTileRows = 4;
#endif
  static constexpr int kTileVectors = 2;  // tile of the product: kTileRows rows of that many vectors, in registers
  // The width is the number of rows of some products, and of columns of others.
  static constexpr int64_t kWidthStep = kTileRows > kLanes ? kTileRows : kLanes, kRowStep = kTileRows;
  static constexpr int64_t kQueryStep = kLanes, kDepthStep = 1;
  static constexpr bool kOneForm = true;  // the rows serve as every operand, without copies

  template <class T>
  static bool load_row(float* to, const T* from, int64_t width, int64_t padded) {
    Vec not_finite{};  // 0 * x is NaN if x is not finite
    for_columns<1>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
      const Vec x = load(from + column, lanes);
      not_finite = fma(x, Vec{}, not_finite);
      store(to + column, x, All{});
    });
    for (int64_t column = round_up(width, kLanes); column < padded; column += kLanes) store(to + column, Vec{}, All{});
    return sum(not_finite) == 0.0f;
  }

  template <class T>
  static void store_row(T* to, const float* from, int64_t width, float scale) {
    store_scaled(to, scale, from, width);
  }
  template <class T>
  static float dot(const T* a, const T* b, int64_t width) {
    return gptlite::GPTLITE_ISA::dot(a, b, width);
  }
  static Vec exp2(Vec x) { return gptlite::GPTLITE_ISA::exp2<6>(x); }

  // Transposes rows [count, width] to the right operand [width, count], so that a product sums over the width.
  static void transposed(float* to, int64_t stride, const float* rows, int64_t count, int64_t width) {
    transpose(to, stride, rows, width, count, width);
  }
  static Left left(const float* rows, int64_t stride) { return {rows, stride, 1}; }
  // Other forms of rows [count, width]: the left operand [width, count] and the right operand [count, width]. In fp32
  // both are views of the rows, so there is nothing to copy.
  static void prepare_columns(float*, int64_t, const float*, int64_t, int64_t, float*) {}
  static Left columns(const float*, int64_t, const float* rows, int64_t width) { return {rows, 1, width}; }
  static void prepare_right(float*, const float*, int64_t, int64_t) {}
  static const float* right(const float*, const float* rows) { return rows; }

  static void store_rows(float* to, int64_t stride, Vec first, Vec second) {
    store(to, first, All{});
    store(to + stride, second, All{});
  }
  static void store_right(float* to, int64_t stride, int64_t row, int64_t column, Vec first, Vec second) {
    store_rows(to + row * stride + column, stride, first, second);
  }

  // Computes c [rows, columns] = a b, or c += a b if `add`, as sums over `depth`.
  static void multiply(float* c, int64_t c_stride, Left a, const float* b, int64_t b_stride, int64_t rows,
                       int64_t columns, int64_t depth, bool add) {
    constexpr int64_t step = kTileVectors * kLanes;
    for (int64_t column = 0; column < columns; column += step) {
      for (int64_t row = 0; row < rows; row += kTileRows) {
        const Left tile{a.data + row * a.row_stride, a.row_stride, a.depth_stride};
        float* to = c + row * c_stride + column;
        if (column + step <= columns) {
          multiply_tile<kTileVectors>(to, c_stride, tile, b + column, b_stride, depth, add);
        } else {
          multiply_tile<1>(to, c_stride, tile, b + column, b_stride, depth, add);
        }
      }
    }
  }

 private:
  template <int vectors>
  GPTLITE_INLINE void multiply_tile(float* c, int64_t c_stride, Left a, const float* b, int64_t b_stride, int64_t depth,
                                    bool add) {
    Vec sums[kTileRows][vectors] = {};
    for (int64_t k = 0; k < depth; ++k) {
      Vec right[vectors];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) right[v] = load(b + k * b_stride + v * kLanes, All{});
#pragma GCC unroll 8
      for (int row = 0; row < kTileRows; ++row) {
        // x - 0 broadcasts x without an instruction. x + 0 would need one, because it changes -0 to 0.
        const Vec left = a.data[row * a.row_stride + k * a.depth_stride] - Vec{};
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) sums[row][v] = fma(left, right[v], sums[row][v]);
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kTileRows; ++row) {
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        float* to = c + row * c_stride + v * kLanes;
        store(to, add ? load(to, All{}) + sums[row][v] : sums[row][v], All{});
      }
    }
  }
};

}  // namespace GPTLITE_ISA
}  // namespace gptlite
