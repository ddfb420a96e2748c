// Declarations of the kernels. The CUDA sources, the CPU sources and the emulated CUDA sources define all of them. The
// binding depends only on this header, which does not depend on torch.
//
// Common to all kernels:
// - A row is the last dim, and contiguous. Pointers need only the alignment of their elements. Sizes may be 0.
// - Elements are of `dtype`. Arithmetic is in fp32. Sums over rows or columns have a fixed order, so the same inputs
//   give the same bits with any number of threads. Inputs do not change, unless a comment says that the output may be
//   the input.
// - If `amax` is not NULL, amax[0] is raised to the largest absolute value that the op writes into y, or dx (dresidual
//   if dx is NULL), after rounding. NaN counts as larger than infinity.
// - The return value is 0 or an error number: a cudaError_t, or on a CPU GPTLITE_UNSUPPORTED.
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

// Activations of an MLP, with the numbers of gptlite.kernels.activation. From GPTLITE_SWIGLU on they are gated.
enum {
  GPTLITE_GELU_TANH = 0,
  GPTLITE_GELU_ERF = 1,
  GPTLITE_RELU = 2,
  GPTLITE_RELU2 = 3,   // ReLU squared
  GPTLITE_SWIGLU = 4,  // f is SiLU
  GPTLITE_GEGLU = 5,   // f is the exact GELU
};

// `context` of a CPU kernel, with which it runs tasks in parallel; NULL runs them one after the other. `parallel_for`
// calls body(state, first, last) on ranges that cover [begin, end), each of at least `grain` indices.
typedef struct GptliteThreads {
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*body)(void* state, int64_t first, int64_t last),
                       void* state);
} GptliteThreads;

// Dropout whose mask depends only on an element's indices. Element (b, h, s, c) of [B, H, S, C] uses word c % 4 of
// Philox4x32-10 with key (seed, site) and counter (c / 4, first_position + s, sample_ids[b] mod 2^32, (first_head + h)
// + ((sample_ids[b] >> 32) << 16)). If the word is >= `threshold`, the element is multiplied by `scale`, else it is
// dropped.
typedef struct GptliteDropout {
  uint32_t seed;
  uint32_t threshold;         // floor(p * 2^32)
  float scale;                // 1 / (1 - p)
  const int64_t* site;        // one number, in device memory
  const int64_t* sample_ids;  // [B], in device memory
  int64_t first_position;
  int64_t first_head;
} GptliteDropout;

// loss = log_sum - x[target] + z_loss * log_sum^2, with log_sum = log sum exp x. The loss is 0 if the target is
// ignore_index. Column i is class first + i of the vocabulary.
typedef struct GptliteLoss {
  int64_t ignore_index;
  int64_t first;
  float z_loss;
  float scale;              // factor of the gradient
  uint8_t* gradient;        // NULL: the gradient overwrites the logits. Else it is written here in e5m2, with values
  int64_t gradient_stride;  // beyond the largest rounded to that, in rows this many bytes apart, from bf16 logits
} GptliteLoss;

// Tensor [batch, heads, positions, width] with contiguous rows: its data, and the strides of the other dims in
// elements.
typedef struct GptliteHeads {
  void* data;
  int64_t batch;
  int64_t head;
  int64_t position;
} GptliteHeads;

// A parameter with its gradient and optimizer state, all contiguous. The parameter and the moments are fp32. The
// updated parameter is also written to `copy`, rounded to `copy_dtype` (bf16 or fp16). NULL: no copy.
typedef struct GptliteAdam {
  float* parameter;
  const void* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  float* step;  // one number: the steps taken before
  int64_t count;
  void* copy;
  int copy_dtype;
} GptliteAdam;

// Declares a kernel for CPUs and for CUDA. `context` is a cudaStream_t, or on a CPU a const GptliteThreads*.
#define GPTLITE_KERNEL(name, ...)                         \
  int gptlite_cpu_##name(__VA_ARGS__, void* context);     \
  int gptlite_cuda_##name(__VA_ARGS__, void* context);

#ifdef __cplusplus
extern "C" {
#endif

// y = softmax(scale * x + mask) over rows of x [batch, heads, queries, keys]. mask has the four strides mask_strides in
// elements, 0 for a broadcast dim. mask_dtype is GPTLITE_BOOL (elements other than 0 are masked), a float dtype (the
// mask is added) or GPTLITE_NONE (no mask). A row with all elements masked or -inf becomes zeros. y may be x.
GPTLITE_KERNEL(masked_softmax_forward, void* y, const void* x, const void* mask, int mask_dtype,
               const int64_t* mask_strides, int64_t batch, int64_t heads, int64_t queries, int64_t keys, float scale,
               int dtype)

// dx = scale * y * (dy - sum(dy * y)) over rows [rows, keys].
GPTLITE_KERNEL(masked_softmax_backward, void* dx, const void* dy, const void* y, int64_t rows, int64_t keys, float scale,
               int dtype)

// y = softmax(scale * x) over the visible keys of each query of x [matrices, queries, keys]. Query i sees the keys 0 to
// i + keys - queries. y is 0 for all other keys, whose x is not read. y may be x.
GPTLITE_KERNEL(causal_softmax_forward, void* y, const void* x, int64_t matrices, int64_t queries, int64_t keys,
               float scale, int dtype)
GPTLITE_KERNEL(causal_softmax_backward, void* dx, const void* dy, const void* y, int64_t matrices, int64_t queries,
               int64_t keys, float scale, int dtype)

// y = (x - mean) * rstd * weight + bias over rows of x [rows, width]. weight and bias (or NULL) are of weight_dtype,
// mean and rstd [rows] are fp32. If mean is NULL, it is an RMS norm: y = x * rstd * weight with
// rstd = 1 / sqrt(mean of x^2 + eps), bias is NULL, and weight may be NULL.
GPTLITE_KERNEL(layer_norm_forward, void* y, float* mean, float* rstd, const void* x, const void* weight, const void* bias,
               int64_t rows, int64_t width, float eps, int dtype, int weight_dtype, float* amax)

// workspace: gptlite_rows_workspace(rows, width) floats with any contents. dbias may be NULL. mean is NULL for an RMS
// norm; then dbias is NULL, and dweight is NULL if weight is.
GPTLITE_KERNEL(layer_norm_backward, void* dx, void* dweight, void* dbias, float* workspace, const void* dy, const void* x,
               const void* weight, const float* mean, const float* rstd, int64_t rows, int64_t width, int dtype,
               int weight_dtype)

// h = residual + dropout(x + bias), and y = layer norm of h, or RMS norm if mean is NULL, as above. All of these are
// [batch * positions, width]. bias (or NULL), weight and beta (or NULL) are [width], of weight_dtype. h is rounded to
// dtype before it is normalized. dropout: NULL for none.
GPTLITE_KERNEL(residual_norm_forward, void* y, void* h, float* mean, float* rstd, const void* x, const void* bias,
               const void* residual, const void* weight, const void* beta, int64_t batch, int64_t positions,
               int64_t width, float eps, const GptliteDropout* dropout, int dtype, int weight_dtype, float* amax)

// dy and dh (or NULL) are the gradients of y and h. dresidual is the whole gradient of h. dx is dresidual after
// dropout; NULL without dropout, as it equals dresidual. dbias (or NULL), dweight and dbeta (or NULL) are of
// weight_dtype. mean is NULL for an RMS norm, as above.
GPTLITE_KERNEL(residual_norm_backward, void* dx, void* dresidual, void* dbias, void* dweight, void* dbeta,
               float* workspace, const void* dy, const void* dh, const void* h, const void* weight, const float* mean,
               const float* rstd, int64_t batch, int64_t positions, int64_t width, const GptliteDropout* dropout,
               int dtype, int weight_dtype, float* amax)

// y = f(x + bias) for x [rows, width]. bias (or NULL) is of dtype and as wide as x. `kind` is one of GPTLITE_GELU_TANH
// etc. For a gated kind, x is [rows, 2 * width], its columns 2 i and 2 i + 1 are the gate and the value of unit i, and
// y = f(gate + bias) * (value + bias). dx and dbias are as wide as x. workspace: gptlite_rows_workspace(rows, x's
// width). x + bias is not rounded before f.
GPTLITE_KERNEL(bias_activation_forward, void* y, const void* x, const void* bias, int64_t rows, int64_t width, int kind,
               int dtype, float* amax)
GPTLITE_KERNEL(bias_activation_backward, void* dx, void* dbias, float* workspace, const void* dy, const void* x,
               const void* bias, int64_t rows, int64_t width, int kind, int dtype, float* amax)

// Norm and rotation of the query and key heads of a packed tensor qkv [tokens, groups, queries + 2, width]. A head is a
// row. The last row of a group is v, which is copied, and the row before it is k. Heads are RMS-normed if eps >= 0,
// rotated if cos and sin are not NULL (at least one of both), and rounded once. Norm: x / sqrt(mean(x^2) + eps) * gain,
// with q_gain and k_gain [width] (or NULL) of gain_dtype, which is dtype or fp32. Rotation, for an even width: the
// halves (a, b) of a row become (a cos - b sin, b cos + a sin), with row token % angles of cos and sin, which are
// [angles, width / 2]. On a GPU the width is at most 512.
GPTLITE_KERNEL(rope_forward, void* out, const void* qkv, const float* cos, const float* sin, const void* q_gain,
               const void* k_gain, int64_t tokens, int64_t angles, int64_t groups, int64_t queries, int64_t width,
               float eps, int dtype, int gain_dtype)
// qkv is read only if there is a norm. dq_gain and dk_gain (or NULL) are of gain_dtype. workspace: as for rows that are
// all heads of all tokens.
GPTLITE_KERNEL(rope_backward, void* dqkv, void* dq_gain, void* dk_gain, float* workspace, const void* dout,
               const void* qkv, const float* cos, const float* sin, const void* q_gain, const void* k_gain,
               int64_t tokens, int64_t angles, int64_t groups, int64_t queries, int64_t width, float eps, int dtype,
               int gain_dtype)

// Gradient of a packed tensor qkv [tokens, groups, queries + 2, width], as above, from those of its parts: dq [tokens,
// groups * queries, width], and dk and dv [tokens, groups, width]. dbias (or NULL), of bias_dtype, is the sum of dqkv
// over tokens. workspace: as for rows that are all heads of a token.
GPTLITE_KERNEL(join_heads, void* dqkv, void* dbias, float* workspace, const void* dq, const void* dk, const void* dv,
               int64_t tokens, int64_t groups, int64_t queries, int64_t width, int dtype, int bias_dtype)

// Adds to each row t of table [vocabulary, width], fp32, the sum of the rows of dy [rows, width] of token t. `tokens`
// [rows], sorted, has the token of row order[i] of dy at place i.
GPTLITE_KERNEL(add_token_rows, float* table, const void* dy, const int64_t* tokens, const int64_t* order, int64_t rows,
               int64_t width, int dtype)

// y = dropout(x), with x [batch, heads, positions, width]. The gradient is the same function of dy. y may be x.
GPTLITE_KERNEL(dropout, void* y, const void* x, int64_t batch, int64_t heads, int64_t positions, int64_t width,
               const GptliteDropout* dropout, int dtype)

// losses[row] of logits [rows, columns], with rows `row_stride` elements apart. With want_gradient, the logits become
// the gradient of the sum of the losses. The columns are the whole vocabulary: loss->first is 0.
// For a target outside the columns, the loss is NaN and the gradient of the row is undefined.
GPTLITE_KERNEL(cross_entropy, float* losses, void* logits, int64_t row_stride, const int64_t* targets, int64_t rows,
               int64_t columns, const GptliteLoss* loss, int want_gradient, int dtype)

// The same in two kernels, if the columns are divided among ranks. stats [rows, 2], fp32, are for the columns of this
// rank: log sum exp, and the target's logit or 0. Without columns they are -inf and 0.
GPTLITE_KERNEL(cross_entropy_stats, float* stats, const void* logits, int64_t row_stride, const int64_t* targets,
               int64_t rows, int64_t columns, const GptliteLoss* loss, int dtype)
// log_sum [rows] is the log sum exp over the columns of all ranks. The logits become the gradient.
GPTLITE_KERNEL(cross_entropy_gradient, void* logits, int64_t row_stride, const int64_t* targets, const float* log_sum,
               int64_t rows, int64_t columns, const GptliteLoss* loss, int dtype)

// Message of x [blocks, width], with width 256 for 8 and 4 bits, 1024 for 1 bit: the blocks' scales, fp32, then
// width * bits / 8 bytes of codes for each block. Byte i has the codes of values i, i + width * bits / 8, ..., the first
// in its lowest bits. The message must be aligned to 4 bytes.
// 8 and 4 bits: scale = max |x| / 127 or / 7, code = x / scale rounded to even, in two's complement. All codes are 0 if
// the scale is 0. 1 bit: scale = the mean of |x| over the values that the mask (bool [blocks, width], NULL: all) has,
// with a sum by halves (of the values i and i + width / 2, then i and i + width / 4, ...); a code is 1 for x < 0. Values
// not in the mask must be 0, and become 0. If a value of a block, or its sum, is not finite, the scale is NaN, and so
// are the values of the block.
GPTLITE_KERNEL(quantize_blocks, void* message, const float* x, const void* mask, int64_t blocks, int bits)
GPTLITE_KERNEL(dequantize_blocks, float* x, const void* message, const void* mask, int64_t blocks, int bits)

// y = x / scale in fp8 for x [rows, width], and `transposed` [width, rows] (or NULL) its transpose. scale[0] = amax[0] /
// the largest number of the format, with amax at least 1e-12. The quotient is rounded to fp32, then to e4m3, or to e5m2
// if `e5m2` is not 0, to nearest even; quotients beyond the largest number become that number.
GPTLITE_KERNEL(quantize_fp8, void* y, void* transposed, float* scale, const void* x, const float* amax, int64_t rows,
               int64_t width, int e5m2, int dtype)

// out[0] = square root of the sum of squares of all elements, fp32, accurate to 1e-6 for any number of elements.
// workspace: gptlite_norm_workspace(total elements, tensors) floats with any contents.
GPTLITE_KERNEL(norm, float* out, float* workspace, const void* const* tensors, const int64_t* counts, int64_t num_tensors,
               int dtype)

// AdamW (arXiv:1711.05101) on many tensors: g = gradient * scale[0] (NULL: 1), m and v are updated with g,
// p -= lr * (weight_decay * p + m / bias1 / (sqrt(v / bias2) + eps)) with bias_i = 1 - beta_i^(step + 1), step += 1.
// Nothing changes if found_inf[0] is not 0 (NULL: never skip). adam: 1 for Adam, which has g += weight_decay * p instead.
// rate: rate[0] replaces lr (NULL: lr), for a step that a CUDA graph replays with another learning rate.
// `dtype` is the dtype of the gradients. scale, found_inf and rate are in device memory, `tensors` is in host memory.
GPTLITE_KERNEL(adamw, const GptliteAdam* tensors, int64_t num_tensors, double lr, double beta1, double beta2, double eps,
               double weight_decay, int adam, const float* scale, const float* found_inf, const double* rate, int dtype)

// Number of floats of a workspace: the same for CUDA, the CPU and the emulator, each of which may use only a part.
int64_t gptlite_rows_workspace(int64_t rows, int64_t width);  // layer_norm, join_heads etc.
int64_t gptlite_norm_workspace(int64_t elements, int64_t num_tensors);

// Causal attention, only on CPUs: out = softmax(scale * q kᵀ + causal mask) v. Query i sees the last `window` of the keys
// 0 to i + keys - queries, with queries <= keys. lse [batch, heads, queries], fp32, is the log sum exp of each row of
// scores. dq, dk and dv may be parts of the same tensor. All their elements are written.
int gptlite_cpu_attention_forward(const GptliteHeads* out, float* lse, const GptliteHeads* q, const GptliteHeads* k,
                                  const GptliteHeads* v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                  int64_t width, float scale, int64_t window, int dtype, void* context);
int gptlite_cpu_attention_backward(const GptliteHeads* dq, const GptliteHeads* dk, const GptliteHeads* dv,
                                   const GptliteHeads* dout, const GptliteHeads* out, const float* lse,
                                   const GptliteHeads* q, const GptliteHeads* k, const GptliteHeads* v, int64_t batch,
                                   int64_t heads, int64_t queries, int64_t keys, int64_t width, float scale,
                                   int64_t window, int dtype, void* context);

// Gradients of a linear layer, on CPUs with AVX512-BF16, AMX or ARM's BF16 (GPTLITE_UNSUPPORTED on others). For dy
// [rows, outputs] and x [rows, inputs], bf16: dw [outputs, inputs] = dyᵀ x, and dbias [outputs] (or NULL) is the sum of
// dy over rows. Results are rounded to bf16 and written as `out_dtype`, bf16 or fp32. `threads` is the number of threads
// of the context, which does not affect the results.
int gptlite_cpu_weight_gradient(void* dw, void* dbias, const void* dy, const void* x, int64_t rows, int64_t outputs,
                                int64_t inputs, int dtype, int out_dtype, int64_t threads, void* context);

// Returns the instruction sets that the CPU kernels use on this machine: "avx512 avx512_bf16 amx_bf16", "avx512", "avx2"
// or "baseline"; on ARM "neon neon_bf16" or "neon".
const char* gptlite_cpu_isa(void);
// Limits the CPU kernels to "baseline", "avx2", "avx512", "avx512_bf16" or "amx", on ARM to "neon" (also "baseline") or
// "neon_bf16"; NULL removes the limit. Returns 0, or GPTLITE_UNSUPPORTED if the CPU lacks the instruction set.
int gptlite_cpu_limit_isa(const char* isa);

#ifdef __cplusplus
}
#endif
