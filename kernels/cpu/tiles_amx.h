// The tile registers of AMX: 8, of 16 rows of 64 bytes.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace gptlite {
namespace amx {

// Tiles 0-3 are the product, 2 by 2; 4 and 5 left operands, 6 and 7 right ones.
class Tiles {
 public:
  static constexpr int64_t kElements = 512;  // of a tile

  Tiles() {
    alignas(64) Config config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    __asm__ volatile("" ::"r"(&config) : "memory");  // some compilers do not know that it is read
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }

  // c [32, 32] (+)= a b over `depth`.
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

  // The same of packed operands: a tile's rows follow each other, then the tile of the next 32 of depth; the other 16
  // rows of a, and columns of b, begin `other` elements on.
  static void multiply_packed(float* c, int64_t c_stride, const uint16_t* a, const uint16_t* b, int64_t other,
                              int64_t depth, bool add) {
    begin(c, c_stride, add);
    const char* next = reinterpret_cast<const char*>(c + 32);  // likely the next product: there when it is wanted
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
    __asm__ volatile("" ::: "memory");  // some compilers do not know that tiles are read
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
