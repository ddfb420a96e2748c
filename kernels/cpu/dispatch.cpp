// C functions of gptlite_kernels.h for CPUs. Each calls the version of its kernel that was compiled for the best
// instruction set of this CPU, which is queried once.
#pragma GCC visibility push(default)
#include "gptlite_kernels.h"
#pragma GCC visibility pop

#include <atomic>
#include <cstring>

#include "isa.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifndef __x86_64__
#define GPTLITE_NO_AMX
#ifndef __aarch64__
#define GPTLITE_NO_BF16
#endif
#endif

namespace gptlite {

#define GPTLITE_FOR_EACH_KERNEL(X) \
  X(masked_softmax_forward)        \
  X(masked_softmax_backward)       \
  X(causal_softmax_forward)        \
  X(causal_softmax_backward)       \
  X(layer_norm_forward)            \
  X(layer_norm_backward)           \
  X(residual_norm_forward)         \
  X(residual_norm_backward)        \
  X(bias_activation_forward)       \
  X(bias_activation_backward)      \
  X(rope_forward)                  \
  X(rope_backward)                 \
  X(join_heads)                    \
  X(add_token_rows)                \
  X(dropout)                       \
  X(cross_entropy)                 \
  X(cross_entropy_stats)           \
  X(cross_entropy_gradient)        \
  X(quantize_blocks)               \
  X(dequantize_blocks)             \
  X(quantize_fp8)                  \
  X(norm)                          \
  X(adamw)                         \
  X(attention_forward)             \
  X(attention_backward)

// Declares the kernels of each namespace, with the same types as in the header.
#define GPTLITE_DECLARE(name) decltype(gptlite_cpu_##name) name;
#ifdef __aarch64__
namespace neon {
GPTLITE_FOR_EACH_KERNEL(GPTLITE_DECLARE)
}
#else
namespace baseline {
GPTLITE_FOR_EACH_KERNEL(GPTLITE_DECLARE)
}
#endif
#ifdef __x86_64__
namespace avx2 {
GPTLITE_FOR_EACH_KERNEL(GPTLITE_DECLARE)
}
namespace avx512 {
GPTLITE_FOR_EACH_KERNEL(GPTLITE_DECLARE)
}
#endif
#ifndef GPTLITE_NO_AMX
namespace amx {  // only these; GPTLITE_UNSUPPORTED makes the caller try the next version
GPTLITE_DECLARE(attention_forward)
GPTLITE_DECLARE(attention_backward)
GPTLITE_DECLARE(weight_gradient)
}  // namespace amx
#endif
#ifndef GPTLITE_NO_BF16
#ifdef __aarch64__
#define GPTLITE_BF16_ISA neon_bf16
#else
#define GPTLITE_BF16_ISA avx512_bf16
#endif
namespace GPTLITE_BF16_ISA {  // as above, only for bf16
GPTLITE_DECLARE(attention_forward)
GPTLITE_DECLARE(attention_backward)
GPTLITE_DECLARE(bias_activation_forward)
GPTLITE_DECLARE(bias_activation_backward)
GPTLITE_DECLARE(weight_gradient)
}  // namespace GPTLITE_BF16_ISA
#endif

namespace {

#ifdef __x86_64__
bool has(unsigned word, int bit) { return word >> bit & 1; }

// Returns which registers the operating system saves on a context switch. An instruction set without that is unusable,
// even if the CPU has it.
uint64_t saved_registers() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// Requests the AMX tile registers, which Linux enables for a process only on request. Returns whether they are usable.
bool may_use_tiles() {
#if defined(__linux__) && !defined(GPTLITE_NO_AMX)
  const int request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

Isa detect() {
  unsigned a, b, c, d, a1 = 0, b1, c1, d1, ignored;
  if (!__get_cpuid(1, &ignored, &ignored, &c1, &ignored) || !has(c1, 27) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
    return Isa::baseline;
  const bool fma = has(c1, 12), f16c = has(c1, 29);
  if (a >= 1) __get_cpuid_count(7, 1, &a1, &b1, &ignored, &d1);
  const uint64_t saved = saved_registers(), ymm = 0x6, zmm = 0xe6, tiles = 0x60000;
  if (!fma || !f16c || !has(b, 5) || (saved & ymm) != ymm) return Isa::baseline;
  const bool avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);  // F, DQ, BW, VL
  if (!avx512 || (saved & zmm) != zmm) return Isa::avx2;
#ifdef GPTLITE_NO_BF16
  return Isa::avx512;
#else
  if (!has(a1, 5)) return Isa::avx512;
  const bool amx = has(d, 22) && has(d, 24);  // BF16, TILE
  return amx && (saved & tiles) == tiles && may_use_tiles() ? Isa::amx : Isa::avx512_bf16;
#endif
}
#elif defined(__aarch64__)
Isa detect() {
#if defined(__linux__) && !defined(GPTLITE_NO_BF16)
  const unsigned long bf16 = 1ul << 14;  // HWCAP2_BF16, which old headers lack: BFDOT and BFCVTN on vectors
  if (getauxval(AT_HWCAP2) & bf16) return Isa::neon_bf16;
#endif
  return Isa::neon;
}
#else
Isa detect() { return Isa::baseline; }
#endif

#ifdef __aarch64__
constexpr Isa kMost = Isa::neon_bf16, kWithBf16 = Isa::neon_bf16;
const char* const kNames[] = {"neon", "neon_bf16"}, * const kUsed[] = {"neon", "neon neon_bf16"};
#else
constexpr Isa kMost = Isa::amx, kWithBf16 = Isa::avx512_bf16;
const char* const kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16", "amx"};
const char* const kUsed[] = {"baseline", "avx2", "avx512", "avx512 avx512_bf16", "avx512 avx512_bf16 amx_bf16"};
#endif

Isa best() {
  static const Isa found = detect();
  return found;
}

std::atomic<Isa> limit{kMost};

}  // namespace

Isa isa() {
  const Isa allowed = limit.load(std::memory_order_relaxed);
  return allowed < best() ? allowed : best();
}

}  // namespace gptlite

#ifdef __x86_64__
#define GPTLITE_RUN(name, ...)                                            \
  (gptlite::isa() >= gptlite::Isa::avx512 ? gptlite::avx512::name         \
   : gptlite::isa() == gptlite::Isa::avx2 ? gptlite::avx2::name           \
                                          : gptlite::baseline::name)(__VA_ARGS__)
#elif defined(__aarch64__)
#define GPTLITE_RUN(name, ...) gptlite::neon::name(__VA_ARGS__)
#else
#define GPTLITE_RUN(name, ...) gptlite::baseline::name(__VA_ARGS__)
#endif

#ifdef GPTLITE_NO_AMX
#define GPTLITE_TRY_AMX(name, ...)
#else
#define GPTLITE_TRY_AMX(name, ...)                           \
  if (gptlite::isa() == gptlite::Isa::amx) {                 \
    const int status = gptlite::amx::name(__VA_ARGS__);      \
    if (status != GPTLITE_UNSUPPORTED) return status;        \
  }
#endif

#ifdef GPTLITE_NO_BF16
#define GPTLITE_TRY_BF16(name, ...)
#else
#define GPTLITE_TRY_BF16(name, ...)                                  \
  if (gptlite::isa() >= gptlite::kWithBf16) {                        \
    const int status = gptlite::GPTLITE_BF16_ISA::name(__VA_ARGS__); \
    if (status != GPTLITE_UNSUPPORTED) return status;                \
  }
#endif

int gptlite_cpu_masked_softmax_forward(void* y, const void* x, const void* mask, int mask_dtype,
                                       const int64_t* mask_strides, int64_t batch, int64_t heads, int64_t queries,
                                       int64_t keys, float scale, int dtype, void* context) {
  return GPTLITE_RUN(masked_softmax_forward, y, x, mask, mask_dtype, mask_strides, batch, heads, queries, keys, scale,
                     dtype, context);
}

int gptlite_cpu_masked_softmax_backward(void* dx, const void* dy, const void* y, int64_t rows, int64_t keys,
                                        float scale, int dtype, void* context) {
  return GPTLITE_RUN(masked_softmax_backward, dx, dy, y, rows, keys, scale, dtype, context);
}

int gptlite_cpu_causal_softmax_forward(void* y, const void* x, int64_t matrices, int64_t queries, int64_t keys,
                                       float scale, int dtype, void* context) {
  return GPTLITE_RUN(causal_softmax_forward, y, x, matrices, queries, keys, scale, dtype, context);
}

int gptlite_cpu_causal_softmax_backward(void* dx, const void* dy, const void* y, int64_t matrices, int64_t queries,
                                        int64_t keys, float scale, int dtype, void* context) {
  return GPTLITE_RUN(causal_softmax_backward, dx, dy, y, matrices, queries, keys, scale, dtype, context);
}

int gptlite_cpu_layer_norm_forward(void* y, float* mean, float* rstd, const void* x, const void* weight,
                                   const void* bias, int64_t rows, int64_t width, float eps, int dtype,
                                   int weight_dtype, float* amax, void* context) {
  return GPTLITE_RUN(layer_norm_forward, y, mean, rstd, x, weight, bias, rows, width, eps, dtype, weight_dtype, amax,
                     context);
}

int gptlite_cpu_layer_norm_backward(void* dx, void* dweight, void* dbias, float* workspace, const void* dy,
                                    const void* x, const void* weight, const float* mean, const float* rstd,
                                    int64_t rows, int64_t width, int dtype, int weight_dtype, void* context) {
  return GPTLITE_RUN(layer_norm_backward, dx, dweight, dbias, workspace, dy, x, weight, mean, rstd, rows, width,
                     dtype, weight_dtype, context);
}

int gptlite_cpu_residual_norm_forward(void* y, void* h, float* mean, float* rstd, const void* x, const void* bias,
                                      const void* residual, const void* weight, const void* beta, int64_t batch,
                                      int64_t positions, int64_t width, float eps, const GptliteDropout* dropout,
                                      int dtype, int weight_dtype, float* amax, void* context) {
  return GPTLITE_RUN(residual_norm_forward, y, h, mean, rstd, x, bias, residual, weight, beta, batch, positions,
                     width, eps, dropout, dtype, weight_dtype, amax, context);
}

int gptlite_cpu_residual_norm_backward(void* dx, void* dresidual, void* dbias, void* dweight, void* dbeta,
                                       float* workspace, const void* dy, const void* dh, const void* h,
                                       const void* weight, const float* mean, const float* rstd, int64_t batch,
                                       int64_t positions, int64_t width, const GptliteDropout* dropout, int dtype,
                                       int weight_dtype, float* amax, void* context) {
  return GPTLITE_RUN(residual_norm_backward, dx, dresidual, dbias, dweight, dbeta, workspace, dy, dh, h, weight, mean,
                     rstd, batch, positions, width, dropout, dtype, weight_dtype, amax, context);
}

int gptlite_cpu_bias_activation_forward(void* y, const void* x, const void* bias, int64_t rows, int64_t width, int kind,
                                        int dtype, float* amax, void* context) {
  GPTLITE_TRY_BF16(bias_activation_forward, y, x, bias, rows, width, kind, dtype, amax, context);
  return GPTLITE_RUN(bias_activation_forward, y, x, bias, rows, width, kind, dtype, amax, context);
}

int gptlite_cpu_bias_activation_backward(void* dx, void* dbias, float* workspace, const void* dy, const void* x,
                                         const void* bias, int64_t rows, int64_t width, int kind, int dtype, float* amax,
                                         void* context) {
  GPTLITE_TRY_BF16(bias_activation_backward, dx, dbias, workspace, dy, x, bias, rows, width, kind, dtype, amax, context);
  return GPTLITE_RUN(bias_activation_backward, dx, dbias, workspace, dy, x, bias, rows, width, kind, dtype, amax, context);
}

int gptlite_cpu_rope_forward(void* out, const void* qkv, const float* cos, const float* sin, const void* q_gain,
                             const void* k_gain, int64_t tokens, int64_t angles, int64_t groups, int64_t queries,
                             int64_t width, float eps, int dtype, int gain_dtype, void* context) {
  return GPTLITE_RUN(rope_forward, out, qkv, cos, sin, q_gain, k_gain, tokens, angles, groups, queries, width, eps,
                     dtype, gain_dtype, context);
}

int gptlite_cpu_rope_backward(void* dqkv, void* dq_gain, void* dk_gain, float* workspace, const void* dout,
                              const void* qkv, const float* cos, const float* sin, const void* q_gain,
                              const void* k_gain, int64_t tokens, int64_t angles, int64_t groups, int64_t queries,
                              int64_t width, float eps, int dtype, int gain_dtype, void* context) {
  return GPTLITE_RUN(rope_backward, dqkv, dq_gain, dk_gain, workspace, dout, qkv, cos, sin, q_gain, k_gain, tokens,
                     angles, groups, queries, width, eps, dtype, gain_dtype, context);
}

int gptlite_cpu_join_heads(void* dqkv, void* dbias, float* workspace, const void* dq, const void* dk, const void* dv,
                           int64_t tokens, int64_t groups, int64_t queries, int64_t width, int dtype, int bias_dtype,
                           void* context) {
  return GPTLITE_RUN(join_heads, dqkv, dbias, workspace, dq, dk, dv, tokens, groups, queries, width, dtype, bias_dtype,
                     context);
}

int gptlite_cpu_add_token_rows(float* table, const void* dy, const int64_t* tokens, const int64_t* order, int64_t rows,
                               int64_t width, int dtype, void* context) {
  return GPTLITE_RUN(add_token_rows, table, dy, tokens, order, rows, width, dtype, context);
}

int gptlite_cpu_dropout(void* y, const void* x, int64_t batch, int64_t heads, int64_t positions, int64_t width,
                        const GptliteDropout* dropout, int dtype, void* context) {
  return GPTLITE_RUN(dropout, y, x, batch, heads, positions, width, dropout, dtype, context);
}

int gptlite_cpu_cross_entropy(float* losses, void* logits, int64_t row_stride, const int64_t* targets, int64_t rows,
                              int64_t columns, const GptliteLoss* loss, int want_gradient, int dtype, void* context) {
  return GPTLITE_RUN(cross_entropy, losses, logits, row_stride, targets, rows, columns, loss, want_gradient, dtype,
                     context);
}

int gptlite_cpu_cross_entropy_stats(float* stats, const void* logits, int64_t row_stride, const int64_t* targets,
                                    int64_t rows, int64_t columns, const GptliteLoss* loss, int dtype,
                                    void* context) {
  return GPTLITE_RUN(cross_entropy_stats, stats, logits, row_stride, targets, rows, columns, loss, dtype, context);
}

int gptlite_cpu_cross_entropy_gradient(void* logits, int64_t row_stride, const int64_t* targets, const float* log_sum,
                                       int64_t rows, int64_t columns, const GptliteLoss* loss, int dtype,
                                       void* context) {
  return GPTLITE_RUN(cross_entropy_gradient, logits, row_stride, targets, log_sum, rows, columns, loss, dtype,
                     context);
}

int gptlite_cpu_quantize_blocks(void* message, const float* x, const void* mask, int64_t blocks, int bits,
                                void* context) {
  return GPTLITE_RUN(quantize_blocks, message, x, mask, blocks, bits, context);
}

int gptlite_cpu_dequantize_blocks(float* x, const void* message, const void* mask, int64_t blocks, int bits,
                                  void* context) {
  return GPTLITE_RUN(dequantize_blocks, x, message, mask, blocks, bits, context);
}

int gptlite_cpu_quantize_fp8(void* y, void* transposed, float* scale, const void* x, const float* amax, int64_t rows,
                             int64_t width, int e5m2, int dtype, void* context) {
  return GPTLITE_RUN(quantize_fp8, y, transposed, scale, x, amax, rows, width, e5m2, dtype, context);
}

int gptlite_cpu_norm(float* out, float* workspace, const void* const* tensors, const int64_t* counts,
                     int64_t num_tensors, int dtype, void* context) {
  return GPTLITE_RUN(norm, out, workspace, tensors, counts, num_tensors, dtype, context);
}

int gptlite_cpu_adamw(const GptliteAdam* tensors, int64_t num_tensors, double lr, double beta1, double beta2,
                      double eps, double weight_decay, int adam, const float* scale, const float* found_inf,
                      const double* rate, int dtype, void* context) {
  return GPTLITE_RUN(adamw, tensors, num_tensors, lr, beta1, beta2, eps, weight_decay, adam, scale, found_inf, rate, dtype,
                     context);
}

int gptlite_cpu_attention_forward(const GptliteHeads* out, float* lse, const GptliteHeads* q, const GptliteHeads* k,
                                  const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                  int64_t width, float scale, int64_t window, int dtype, void* context) {
  GPTLITE_TRY_AMX(attention_forward, out, lse, q, k, v, batch, heads, queries, keys, width, scale, window, dtype,
                  context);
  GPTLITE_TRY_BF16(attention_forward, out, lse, q, k, v, batch, heads, queries, keys, width, scale, window, dtype,
                   context);
  return GPTLITE_RUN(attention_forward, out, lse, q, k, v, batch, heads, queries, keys, width, scale, window, dtype,
                     context);
}

int gptlite_cpu_attention_backward(const GptliteHeads* dq, const GptliteHeads* dk, const GptliteHeads* dv,
                                   const GptliteHeads* dout, const GptliteHeads* out, const float* lse,
                                   const GptliteHeads* q, const GptliteHeads* k, const GptliteHeads* v, int64_t batch,
                                   int64_t heads, int64_t queries, int64_t keys, int64_t width, float scale,
                                   int64_t window, int dtype, void* context) {
  GPTLITE_TRY_AMX(attention_backward, dq, dk, dv, dout, out, lse, q, k, v, batch, heads, queries, keys, width, scale,
                  window, dtype, context);
  GPTLITE_TRY_BF16(attention_backward, dq, dk, dv, dout, out, lse, q, k, v, batch, heads, queries, keys, width, scale,
                   window, dtype, context);
  return GPTLITE_RUN(attention_backward, dq, dk, dv, dout, out, lse, q, k, v, batch, heads, queries, keys, width,
                     scale, window, dtype, context);
}

int gptlite_cpu_weight_gradient(void* dw, void* dbias, const void* dy, const void* x, int64_t rows, int64_t outputs,
                                int64_t inputs, int dtype, int out_dtype, int64_t threads, void* context) {
  GPTLITE_TRY_AMX(weight_gradient, dw, dbias, dy, x, rows, outputs, inputs, dtype, out_dtype, threads, context);
  GPTLITE_TRY_BF16(weight_gradient, dw, dbias, dy, x, rows, outputs, inputs, dtype, out_dtype, threads, context);
  return GPTLITE_UNSUPPORTED;
}

const char* gptlite_cpu_isa(void) { return gptlite::kUsed[static_cast<int>(gptlite::isa())]; }

int gptlite_cpu_limit_isa(const char* isa) {
  if (!isa) {
    gptlite::limit = gptlite::kMost;
    return 0;
  }
  int found = std::strcmp(isa, "baseline") ? -1 : 0;  // on ARM, too
  for (int i = 0; i <= static_cast<int>(gptlite::best()); ++i)
    if (!std::strcmp(isa, gptlite::kNames[i])) found = i;
  if (found < 0) return GPTLITE_UNSUPPORTED;
  gptlite::limit = gptlite::Isa(found);
  return 0;
}
