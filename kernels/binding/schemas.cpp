// Schemas of the ops. Ops whose name ends in an underscore change their arguments; all others are functional.
#include "common.h"

#define GPTLITE_DROPOUT "float p, int seed, Tensor? site, Tensor? sample_ids, int first_position"

#ifdef USE_CUDA
// Returns 1 if this torch has the function from which the kernels get their stream.
extern "C" __attribute__((visibility("default"))) int gptlite_cuda_knows_stream() {
  return gptlite::binding::knows_stream();
}
#endif

STABLE_TORCH_LIBRARY(gptlite, m) {
  m.def("masked_softmax(Tensor x, Tensor? mask, float scale) -> Tensor");
  m.def("masked_softmax_(Tensor(a!) x, Tensor? mask, float scale) -> ()");
  m.def("masked_softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor");
  m.def("masked_softmax_backward_(Tensor(a!) dy, Tensor y, float scale) -> ()");
  m.def("causal_softmax(Tensor x, float scale) -> Tensor");
  m.def("causal_softmax_(Tensor(a!) x, float scale) -> ()");
  m.def("causal_softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor");
  m.def("causal_softmax_backward_(Tensor(a!) dy, Tensor y, float scale) -> ()");

  // *_amax: the same op, which also returns the largest absolute value of y, or of dx (dresidual without dropout).
  // rms: RMS norm, whose weight may be None. Its mean has no elements. The backward op takes None for the mean.
  m.def(
      "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool rms=False) -> "
      "(Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_amax(Tensor x, Tensor? weight, Tensor? bias, float eps, bool rms=False) -> "
      "(Tensor y, Tensor mean, Tensor rstd, Tensor amax)");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, bool has_bias) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias)");
  m.def("residual_norm(Tensor x, Tensor? bias, Tensor residual, Tensor? weight, Tensor? beta, float eps, " GPTLITE_DROPOUT
        ", bool rms=False) -> (Tensor y, Tensor h, Tensor mean, Tensor rstd)");
  m.def(
      "residual_norm_amax(Tensor x, Tensor? bias, Tensor residual, Tensor? weight, Tensor? beta, float eps, " GPTLITE_DROPOUT
      ", bool rms=False) -> (Tensor y, Tensor h, Tensor mean, Tensor rstd, Tensor amax)");
  m.def(
      "residual_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? mean, Tensor rstd, bool has_bias, "
      "bool has_beta, " GPTLITE_DROPOUT
      ") -> (Tensor dx, Tensor dresidual, Tensor dbias, Tensor dweight, Tensor dbeta)");
  m.def(
      "residual_norm_amax_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? mean, Tensor rstd, "
      "bool has_bias, bool has_beta, " GPTLITE_DROPOUT
      ") -> (Tensor dx, Tensor dresidual, Tensor dbias, Tensor dweight, Tensor dbeta, Tensor amax)");
  m.def("bias_activation(Tensor x, Tensor? bias, int kind) -> Tensor");
  m.def("bias_activation_amax(Tensor x, Tensor? bias, int kind) -> (Tensor y, Tensor amax)");
  m.def("bias_activation_backward(Tensor dy, Tensor x, Tensor? bias, int kind) -> (Tensor dx, Tensor dbias)");
  m.def(
      "bias_activation_amax_backward(Tensor dy, Tensor x, Tensor? bias, int kind) -> "
      "(Tensor dx, Tensor dbias, Tensor amax)");
  m.def("rope(Tensor qkv, Tensor? cos, Tensor? sin, Tensor? q_gain, Tensor? k_gain, float? eps) -> Tensor");
  m.def(
      "rope_backward(Tensor dout, Tensor? qkv, Tensor? cos, Tensor? sin, Tensor? q_gain, Tensor? k_gain, float? eps) -> "
      "(Tensor dqkv, Tensor dq_gain, Tensor dk_gain)");
  // bias: dbias, the sum of dqkv over tokens, is wanted, in fp32 or in the dtype of dq.
  m.def(
      "join_heads(Tensor dq, Tensor dk, Tensor dv, bool bias, bool fp32) -> (Tensor dqkv, Tensor dbias)");
  m.def("add_token_rows_(Tensor(a!) table, Tensor dy, Tensor tokens, Tensor order) -> ()");
  m.def(
      "dropout(Tensor x, float p, int seed, Tensor site, Tensor sample_ids, int first_position, int first_head) -> "
      "Tensor");

  m.def(
      "cross_entropy_(Tensor(a!) logits, Tensor targets, float z_loss, int ignore_index, bool want_gradient, "
      "float scale=1.0, Tensor(b!)? gradient=None) -> Tensor");
  m.def("cross_entropy_stats(Tensor logits, Tensor targets, int first, int ignore_index) -> Tensor");
  m.def(
      "cross_entropy_gradient_(Tensor(a!) logits, Tensor targets, Tensor log_sum, int first, float z_loss, "
      "int ignore_index, float scale=1.0, Tensor(b!)? gradient=None) -> ()");

  // mask: of x, for 1 bit alone. message: of uint8, with the scales of all blocks, then their codes.
  m.def("quantize_blocks(Tensor x, Tensor? mask, int bits) -> Tensor");
  m.def("dequantize_blocks(Tensor message, Tensor? mask, int blocks, int bits) -> Tensor");

  // amax: fp32 scalar. y and the transpose, of uint8, are e4m3, or e5m2. Without `both`, the transpose has no elements.
  m.def("quantize_fp8(Tensor x, Tensor amax, bool e5m2, bool both) -> (Tensor y, Tensor transposed, Tensor scale)");

  m.def("norm(Tensor[] tensors) -> Tensor");
  m.def(
      "adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
      "Tensor(d!)[] steps, float lr, float beta1, float beta2, float eps, float weight_decay, bool adam, Tensor? scale, "
      "Tensor? found_inf, Tensor(e!)[]? copies=None, Tensor? rate=None) -> ()");

  m.def("weight_gradient(Tensor dy, Tensor x, bool bias, bool fp32) -> (Tensor dw, Tensor dbias)");
  m.def("attention(Tensor q, Tensor k, Tensor v, float scale, int window=0) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor dout, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, float scale, "
      "int window=0) -> (Tensor dq, Tensor dk, Tensor dv)");
  m.def("attention_packed(Tensor qkv, float scale, int window=0) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_packed_backward(Tensor dout, Tensor out, Tensor lse, Tensor qkv, float scale, int window=0) -> "
      "Tensor");
}
