// Causal attention of bf16 by AMX: tiles of 16 rows of 64 bytes, multiplied in squares.
#include <immintrin.h>

#include "attention.h"
#include "attention_backward.h"
#include "attention_bf16.h"
#include "attention_forward.h"

namespace gptlite {
namespace amx {

// Tiles 0-3 are the product, 2 by 2; 4 and 5 left operands, 6 and 7 right ones.
class Tiles {
 public:
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
    const int64_t c_bytes = c_stride * 4, a_bytes = a_stride * 2, b_bytes = b_stride * 4;
    float* lower = c + 16 * c_stride;
    __asm__ volatile("" ::: "memory");  // nor this of tile loads
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
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(2, lower, c_bytes);
    _tile_stored(3, lower + 16, c_bytes);
  }

 private:
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
};

int attention_forward(const GptliteHeads* out, float* lse, const GptliteHeads* q, const GptliteHeads* k,
                      const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width,
                      float scale, int dtype, void* context) {
  if (dtype != GPTLITE_BF16) return GPTLITE_UNSUPPORTED;
  const AttentionShape shape{batch, heads, queries, keys, width, scale};
  return forward_by_blocks<Bf16Math<Tiles>, Bf16>(out, lse, q, k, v, shape, context);
}

int attention_backward(const GptliteHeads* dq, const GptliteHeads* dk, const GptliteHeads* dv, const GptliteHeads* dout,
                       const GptliteHeads* out, const float* lse, const GptliteHeads* q, const GptliteHeads* k,
                       const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                       int64_t width, float scale, int dtype, void* context) {
  if (dtype != GPTLITE_BF16) return GPTLITE_UNSUPPORTED;
  const AttentionShape shape{batch, heads, queries, keys, width, scale};
  return backward_by_blocks<Bf16Math<Tiles>, Bf16>(dq, dk, dv, dout, out, lse, q, k, v, shape, context);
}

}  // namespace amx
}  // namespace gptlite
