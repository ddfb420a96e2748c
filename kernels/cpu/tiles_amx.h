// Products of 32 by 32 blocks of bf16 matrices on the 8 tile registers of AMX, each of 16 rows of 64 bytes.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace gptlite {
namespace amx {

// Tiles 0 to 3 hold the product (2 by 2 tiles of fp32), tiles 4 and 5 the left operand, tiles 6 and 7 the right
// operand. The tiles are configured while the object exists.
class Tiles {
 public:
  static constexpr int64_t kElements = 512;  // bf16 elements of a tile

  Tiles() {
    alignas(64) Config config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    __asm__ volatile("" ::"r"(&config) : "memory");  // some compilers miss that the next line reads it
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }

  // Computes c [32, 32] = a b, or c += a b if `add`. `depth`, the dimension that is summed over, is a multiple of 32.
  static void multiply(float* c, int64_t c_stride, const uint16_t* a, int64_t a_stride, const uint16_t* b,
                       int64_t b_stride, int64_t depth, bool add) {
    const int64_t a_bytes = a_stride * 2, b_bytes = b_stride * 4;
    begin(c, c_stride, add);
    for (int64_t k = 0; k < depth; k += 32) {
      _tile_loadd(4, a + k, a_bytes);
      _tile_loadd(5, a + 16 * a_stride + k, a_bytes);
      _tile_loadd(6, b + k * b_stride, b_bytes);
      _tile_loadd(7, b + k * b_stride + 32, b_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    end(c, c_stride);
  }

  // Computes the same from packed operands. The rows of a tile are contiguous, and the tile of the next 32 in depth
  // follows. The other 16 rows of a, or columns of b, start `other` elements later.
  static void multiply_packed(float* c, int64_t c_stride, const uint16_t* a, const uint16_t* b, int64_t other,
                              int64_t depth, bool add) {
    begin(c, c_stride, add);
    const char* next = reinterpret_cast<const char*>(c + 32);  // probably the next product: prefetch it
    for (int64_t at = 0; at < depth * 16; at += kElements) {
      _tile_loadd(4, a + at, 64);
      _tile_loadd(6, b + at, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + other + at, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + other + at, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      for (int row = 0; row < 4; ++row, next += c_stride * 4) {
        _mm_prefetch(next, _MM_HINT_T0);
        _mm_prefetch(next + 64, _MM_HINT_T0);
      }
    }
    end(c, c_stride);
  }

 private:
  static void begin(const float* c, int64_t c_stride, bool add) {
    const float* const lower = c + 16 * c_stride;
    const int64_t c_bytes = c_stride * 4;
    __asm__ volatile("" ::: "memory");  // some compilers miss that tile loads read memory
    if (add) {
      _tile_loadd(0, c, c_bytes);
      _tile_loadd(1, c + 16, c_bytes);
      _tile_loadd(2, lower, c_bytes);
      _tile_loadd(3, lower + 16, c_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  static void end(float* c, int64_t c_stride) {
    float* const lower = c + 16 * c_stride;
    const int64_t c_bytes = c_stride * 4;
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(2, lower, c_bytes);
    _tile_stored(3, lower + 16, c_bytes);
  }

  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
};

}  // namespace amx
}  // namespace gptlite
