// The kernels, one declaration each: what the CUDA sources, the CPU sources and the emulated CUDA sources all define, and
// all that the binding knows of them. Nothing here knows torch.
//
// Common to all:
// - A row is the last dim, contiguous. Pointers need no alignment beyond their element's. Sizes may be 0.
// - Elements are of `dtype`; arithmetic is fp32; sums over rows or columns are in a fixed order, so the same inputs give
//   the same bits on any number of threads. Inputs are left as they are, unless an argument says it may be the output too.
// - The return value is 0, or an error's number (a cudaError_t; CPU: GPTLITE_UNSUPPORTED).
#pragma once

#include <stddef.h>
#include <stdint.h>

enum {
  GPTLITE_NONE = -1,
  GPTLITE_FP32 = 0,
  GPTLITE_BF16 = 1,
  GPTLITE_FP16 = 2,
  GPTLITE_BOOL = 3,  // one byte
};

enum { GPTLITE_UNSUPPORTED = 10001 };

// Activations of an MLP, as gptlite.kernels.activation has them; from GPTLITE_SWIGLU on, gated.
enum {
  GPTLITE_GELU_TANH = 0,
  GPTLITE_GELU_ERF = 1,
  GPTLITE_RELU = 2,
  GPTLITE_RELU2 = 3,   // ReLU squared
  GPTLITE_SWIGLU = 4,  // f is SiLU
  GPTLITE_GEGLU = 5,   // f is the exact GELU
};

// `context` of a CPU kernel: how it runs tasks in parallel. NULL: one after the other. `parallel_for` calls
// body(state, first, last) on ranges that cover [begin, end), each of at least `grain` indices.
typedef struct GptliteThreads {
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*body)(void* state, int64_t first, int64_t last),
                       void* state);
} GptliteThreads;

// Dropout whose mask is a function of where an element stands. Element (b, h, s, c) of [B, H, S, C] takes word c % 4 of
// Philox4x32-10 with key (seed, site) and counter (c / 4, first_position + s, sample_ids[b] mod 2^32,
// (first_head + h) + ((sample_ids[b] >> 32) << 16)), and is kept, times `scale`, where that word is >= `threshold`.
typedef struct GptliteDropout {
  uint32_t seed;
  uint32_t threshold;         // floor(p * 2^32)
  float scale;                // 1 / (1 - p)
  const int64_t* site;        // one number, in the device's memory
  const int64_t* sample_ids;  // [B], in the device's memory
  int64_t first_position;
  int64_t first_head;
} GptliteDropout;

// loss = log_sum - (1 - e) x[target] - e / vocab_size * sum(x) + z_loss * log_sum^2, with log_sum = log sum exp x and
// e = label_smoothing; 0 where the target is ignore_index. Column i has the number first + i.
typedef struct GptliteLoss {
  int64_t ignore_index;
  int64_t first;
  int64_t vocab_size;  // columns of all ranks together
  float label_smoothing;
  float z_loss;
  float scale;  // of the gradient
} GptliteLoss;

// Rows of `width` of a tensor [batch, heads, positions, width], wherever they are; strides in elements.
typedef struct GptliteHeads {
  void* data;
  int64_t batch;
  int64_t head;
  int64_t position;
} GptliteHeads;

// One tensor of an optimizer, all contiguous; parameter and moments are fp32. `copy`, of `copy_dtype`, bf16 or fp16, is
// what the parameter is rounded to as it is written; NULL for none.
typedef struct GptliteAdam {
  float* parameter;
  const void* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  float* step;  // one number: steps taken before
  int64_t count;
  void* copy;
  int copy_dtype;
} GptliteAdam;

// Declares a kernel in its three forms. `context`: a cudaStream_t; on a CPU a const GptliteThreads*.
#define GPTLITE_KERNEL(name, ...)                         \
  int gptlite_cpu_##name(__VA_ARGS__, void* context);     \
  int gptlite_cuda_##name(__VA_ARGS__, void* context);

#ifdef __cplusplus
extern "C" {
#endif

// y = softmax(scale * x + mask) over rows of x [batch, heads, queries, keys]. mask: [.., .., .., ..] with strides (0:
// broadcast) in elements, of mask_dtype: GPTLITE_BOOL (not 0: left out), a float dtype (added), or GPTLITE_NONE. A row with
// all left out, or all -inf, is zeros. y may be x.
GPTLITE_KERNEL(masked_softmax_forward, void* y, const void* x, const void* mask, int mask_dtype,
               const int64_t* mask_strides, int64_t batch, int64_t heads, int64_t queries, int64_t keys, float scale,
               int dtype)

// dx = scale * y * (dy - sum(dy * y)) over rows [rows, keys].
GPTLITE_KERNEL(masked_softmax_backward, void* dx, const void* dy, const void* y, int64_t rows, int64_t keys, float scale,
               int dtype)

// y = softmax(scale * x) over the keys that query i sees, 0 .. i + keys - queries; zeros elsewhere, where x is not
// read. x [matrices, queries, keys]. A query that sees none has zeros. y may be x.
GPTLITE_KERNEL(causal_softmax_forward, void* y, const void* x, int64_t matrices, int64_t queries, int64_t keys,
               float scale, int dtype)
GPTLITE_KERNEL(causal_softmax_backward, void* dx, const void* dy, const void* y, int64_t matrices, int64_t queries,
               int64_t keys, float scale, int dtype)

// y = (x - mean) * rstd * weight + bias over rows of x [rows, width]. weight, bias (or NULL) are of weight_dtype;
// mean, rstd [rows] fp32. mean NULL: RMS norm, y = x * rstd * weight with rstd = 1 / sqrt(mean of x^2 + eps); then bias is
// NULL, and weight may be NULL.
GPTLITE_KERNEL(layer_norm_forward, void* y, float* mean, float* rstd, const void* x, const void* weight, const void* bias,
               int64_t rows, int64_t width, float eps, int dtype, int weight_dtype)

// workspace: as many floats as the function below says, contents of no matter. dbias may be NULL. mean NULL: of an RMS norm;
// then dbias is NULL, and dweight where weight is.
GPTLITE_KERNEL(layer_norm_backward, void* dx, void* dweight, void* dbias, float* workspace, const void* dy, const void* x,
               const void* weight, const float* mean, const float* rstd, int64_t rows, int64_t width, int dtype,
               int weight_dtype)

// h = residual + dropout(x + bias), y = layer norm of h (mean NULL: RMS norm, as above); all [batch * positions, width], bias (or NULL), weight and beta (or
// NULL) [width] of weight_dtype. h is rounded to dtype before it is normed. dropout: NULL for none.
GPTLITE_KERNEL(residual_norm_forward, void* y, void* h, float* mean, float* rstd, const void* x, const void* bias,
               const void* residual, const void* weight, const void* beta, int64_t batch, int64_t positions,
               int64_t width, float eps, const GptliteDropout* dropout, int dtype, int weight_dtype)

// dy and dh (or NULL): gradients of y and h. dresidual: the whole gradient of h; dx, dropped out (NULL without dropout: it
// is dresidual); dbias (or NULL), dweight and dbeta (or NULL) of weight_dtype. mean NULL: as above.
GPTLITE_KERNEL(residual_norm_backward, void* dx, void* dresidual, void* dbias, void* dweight, void* dbeta,
               float* workspace, const void* dy, const void* dh, const void* h, const void* weight, const float* mean,
               const float* rstd, int64_t batch, int64_t positions, int64_t width, const GptliteDropout* dropout,
               int dtype, int weight_dtype)

// y = f(x + bias) over x [rows, width]; bias (or NULL) of dtype, as wide as x; f by `kind`, one of GPTLITE_GELU_TANH etc. Of
// a gated kind x is [rows, 2 * width], its columns 2 i and 2 i + 1 are the gate and the value of unit i, and
// y = f(gate + bias) * (value + bias). dx and dbias are as wide as x; workspace: gptlite_rows_workspace(rows, x's width).
// Sums are not rounded before f.
GPTLITE_KERNEL(bias_activation_forward, void* y, const void* x, const void* bias, int64_t rows, int64_t width, int kind,
               int dtype)
GPTLITE_KERNEL(bias_activation_backward, void* dx, void* dbias, float* workspace, const void* dy, const void* x,
               const void* bias, int64_t rows, int64_t width, int kind, int dtype)

// The query and key heads of a packed tensor qkv [tokens, groups, queries + 2, width], each a row: RMS-normed if eps >= 0 and
// rotated if cos and sin are not NULL, at least one of both; rounded once. Of a group the last row is v, which is copied,
// and the row before is k. Norm: x / sqrt(mean(x^2) + eps) * gain, q_gain and k_gain [width] (or NULL) of gain_dtype,
// which is dtype or fp32. Rotation, width even: of (a, b), a row's halves, to (a cos - b sin, b cos + a sin), with row
// token % angles of cos and sin [angles, width / 2]. On a GPU width is at most 512.
GPTLITE_KERNEL(rope_forward, void* out, const void* qkv, const float* cos, const float* sin, const void* q_gain,
               const void* k_gain, int64_t tokens, int64_t angles, int64_t groups, int64_t queries, int64_t width,
               float eps, int dtype, int gain_dtype)
// qkv is read with a norm only. dq_gain, dk_gain (or NULL) of gain_dtype. workspace: rows are all heads.
GPTLITE_KERNEL(rope_backward, void* dqkv, void* dq_gain, void* dk_gain, float* workspace, const void* dout,
               const void* qkv, const float* cos, const float* sin, const void* q_gain, const void* k_gain,
               int64_t tokens, int64_t angles, int64_t groups, int64_t queries, int64_t width, float eps, int dtype,
               int gain_dtype)

// y = x dropped out, x [batch, heads, positions, width]; the same is its gradient. y may be x.
GPTLITE_KERNEL(dropout, void* y, const void* x, int64_t batch, int64_t heads, int64_t positions, int64_t width,
               const GptliteDropout* dropout, int dtype)

// losses[row] of logits [rows, columns], rows `row_stride` elements apart; want_gradient: logits become the gradient of the
// sum of the losses. All columns are here: loss->first is 0, loss->vocab_size is columns. The loss of a target that is
// no column is NaN, and its row's gradient of no meaning.
GPTLITE_KERNEL(cross_entropy, float* losses, void* logits, int64_t row_stride, const int64_t* targets, int64_t rows,
               int64_t columns, const GptliteLoss* loss, int want_gradient, int dtype)

// The same where ranks share the columns, in two halves. stats[row] = (log sum exp, the target's logit or 0, the sum of
// logits), fp32 [rows, 3], of the columns here; -inf, 0, 0 for none.
GPTLITE_KERNEL(cross_entropy_stats, float* stats, const void* logits, int64_t row_stride, const int64_t* targets,
               int64_t rows, int64_t columns, const GptliteLoss* loss, int dtype)
// log_sum [rows]: of all columns. logits become the gradient.
GPTLITE_KERNEL(cross_entropy_gradient, void* logits, int64_t row_stride, const int64_t* targets, const float* log_sum,
               int64_t rows, int64_t columns, const GptliteLoss* loss, int dtype)

// out[0] = sqrt of the sum of squares of all elements, fp32, accurate to 1e-6 at any number of them. workspace as for the
// others: gptlite_norm_workspace(total elements, tensors).
GPTLITE_KERNEL(norm, float* out, float* workspace, const void* const* tensors, const int64_t* counts, int64_t num_tensors,
               int dtype)

// AdamW (arXiv:1711.05101) over many tensors: g = gradient * scale[0] (NULL: 1); m, v updated by g;
// p -= lr * (weight_decay * p + m / bias1 / (sqrt(v / bias2) + eps)), bias_i = 1 - beta_i^(step + 1); step += 1.
// Nothing is changed where found_inf[0] is not 0 (NULL: never). adam: 1 for Adam, where g += weight_decay * p instead.
// `dtype` is the gradients'. scale and found_inf are in the device's memory; `tensors` is in the host's.
GPTLITE_KERNEL(adamw, const GptliteAdam* tensors, int64_t num_tensors, double lr, double beta1, double beta2, double eps,
               double weight_decay, int adam, const float* scale, const float* found_inf, int dtype)

// Floats of workspace; the same function for CUDA, CPU and emulator: each takes what it needs of it.
int64_t gptlite_rows_workspace(int64_t rows, int64_t width);  // layer_norm, residual_norm, bias_activation, rope
int64_t gptlite_norm_workspace(int64_t elements, int64_t num_tensors);

// Causal attention, on CPUs alone: out = softmax(scale * q kᵀ + causal mask) v, query i seeing keys
// 0 .. i + keys - queries (queries <= keys). lse [batch, heads, queries] fp32: log sum exp of each row of scores. dq, dk and dv
// may be parts of one tensor; all their elements are written.
int gptlite_cpu_attention_forward(const GptliteHeads* out, float* lse, const GptliteHeads* q, const GptliteHeads* k,
                                  const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                  int64_t width, float scale, int dtype, void* context);
int gptlite_cpu_attention_backward(const GptliteHeads* dq, const GptliteHeads* dk, const GptliteHeads* dv,
                                   const GptliteHeads* dout, const GptliteHeads* out, const float* lse,
                                   const GptliteHeads* q, const GptliteHeads* k, const GptliteHeads* v, int64_t batch,
                                   int64_t heads, int64_t queries, int64_t keys, int64_t width, float scale, int dtype,
                                   void* context);

// The gradients of a linear layer, on CPUs with AVX512-BF16 or AMX (elsewhere GPTLITE_UNSUPPORTED): dw [outputs, inputs] = dyᵀ x
// and, if not NULL, dbias [outputs], dy's sums; of dy [rows, outputs] and x [rows, inputs], bf16. Results are rounded to
// bf16 and written as `out_dtype`, bf16 or fp32. `threads`: how many the context has. They change no bit.
int gptlite_cpu_weight_gradient(void* dw, void* dbias, const void* dy, const void* x, int64_t rows, int64_t outputs,
                                int64_t inputs, int dtype, int out_dtype, int64_t threads, void* context);

// The instruction sets this CPU library would use here, "avx512 avx512_bf16 amx_bf16", "avx2" or "baseline"; and, for tests,
// a way to have it use a lesser one ("baseline", "avx2", "avx512", "amx"; NULL: the best). Returns 0, or
// GPTLITE_UNSUPPORTED where the CPU has it not.
const char* gptlite_cpu_isa(void);
int gptlite_cpu_limit_isa(const char* isa);

#ifdef __cplusplus
}
#endif
