// Layer norm and RMS norm, alone and after a residual; bias and GELU; dropout.
#include "common.h"

namespace gptlite::binding {
namespace {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// A vector of a row's width on the device of `like`, whose dtype is the caller's to check.
Tensor row_vector(const Tensor& vector, const char* name, int64_t width, const Tensor& like) {
  check_device(vector, name, like);
  check_sizes(vector, name, {width});
  return as_contiguous(vector);
}

OptionalTensor row_vector(const OptionalTensor& vector, const char* name, int64_t width, const Tensor& like, int dtype,
                          const char* dtype_like) {
  if (!vector) return std::nullopt;
  check_dtype(*vector, name, dtype, dtype_like);
  return row_vector(*vector, name, width, like);
}

// mean or rstd: a float for each row.
Tensor row_statistic(const Tensor& statistic, const char* name, const Rows& size, const Tensor& like) {
  check_device(statistic, name, like);
  check_fp32(statistic, name);
  check_sizes(statistic, name, size.leading);
  return as_contiguous(statistic);
}

Tensor new_workspace(const Rows& size, const Tensor& like) {
  return empty({gptlite_rows_workspace(size.rows, size.width)}, GPTLITE_FP32, like);
}

// Gradient of a parameter of a row's width; of no size where there is no parameter.
Tensor new_vector(bool wanted, int64_t width, int dtype, const Tensor& like) {
  return empty({wanted ? width : 0}, dtype, like);
}

void* data_if(bool wanted, const Tensor& tensor) { return wanted ? mutable_data(tensor) : nullptr; }

// A mask's key, and the tensors that hold part of it.
class Dropout {
 public:
  Dropout(double p, int64_t seed, const OptionalTensor& site, const OptionalTensor& sample_ids, int64_t first_position,
          int64_t first_head, const Tensor& x) {
    STD_TORCH_CHECK(p >= 0 && p < 1, "p must be at least 0 and less than 1, not ", p);
    if (p == 0 || !site) return;
    STD_TORCH_CHECK(sample_ids, "dropout needs sample_ids");
    STD_TORCH_CHECK(x.dim() == 3 || x.dim() == 4, "x must be [B, S, C] or [B, H, S, C], not ", text(sizes_of(x)));
    check_device(*site, "site", x);
    check_device(*sample_ids, "sample_ids", x);
    check_int64(*site, "site");
    check_int64(*sample_ids, "sample_ids");
    STD_TORCH_CHECK(site->numel() == 1, "site must be one number, not ", text(sizes_of(*site)));
    check_sizes(*sample_ids, "sample_ids", {x.size(0)});
    STD_TORCH_CHECK(seed >= 0 && seed < (int64_t(1) << 32), "seed must be at least 0 and less than 2^32, not ", seed);
    sample_ids_ = as_contiguous(*sample_ids);
    site_ = site;
    key_ = {uint32_t(seed),   uint32_t(p * 4294967296.0), float(1 / (1 - p)), integers(*site_), integers(*sample_ids_),
            first_position, first_head};
  }

  // NULL: none.
  const GptliteDropout* get() const { return site_ ? &key_ : nullptr; }

 private:
  OptionalTensor site_, sample_ids_;
  GptliteDropout key_{};
};

// Rows of x as [batch, positions], whose product alone matters without dropout.
std::tuple<int64_t, int64_t> batch_and_positions(const Tensor& x, const Rows& size, const Dropout& dropout) {
  if (!dropout.get()) return {1, size.rows};
  STD_TORCH_CHECK(x.dim() == 3, "with dropout x must be [B, S, C], not ", text(sizes_of(x)));
  return {x.size(0), x.size(1)};
}

// The weight of a norm, and the dtype of its parameters: the weight's, or x's where there is none.
struct Gain {
  OptionalTensor weight;
  int dtype;
  const char* like;

  Gain(const OptionalTensor& weight_, bool has_bias, bool rms, const Rows& size, const Tensor& x)
      : dtype(weight_ ? float_dtype(*weight_, "weight") : float_dtype(x, "x")), like(weight_ ? "weight" : "x") {
    STD_TORCH_CHECK(rms || weight_, "a layer norm must have a weight; an RMS norm may be without");
    STD_TORCH_CHECK(!rms || !has_bias, "an RMS norm has no bias");
    if (weight_) weight = row_vector(*weight_, "weight", size.width, x);
  }

  bool there() const { return weight.has_value(); }
};

// Of an RMS norm: no elements, and no pointer.
Tensor new_mean(bool rms, const Rows& size, const Tensor& x) {
  return empty(rms ? Sizes{0} : size.leading, GPTLITE_FP32, x);
}

float* mean_data(bool rms, const Tensor& mean) { return rms ? nullptr : mutable_floats(mean); }

OptionalTensor row_mean(const OptionalTensor& mean, const Rows& size, const Tensor& like) {
  return mean ? OptionalTensor(row_statistic(*mean, "mean", size, like)) : std::nullopt;
}

Three layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool rms) {
  const int dtype = float_dtype(x, "x");
  const Rows size(x, "x");
  const Gain gain(weight, bias.has_value(), rms, size, x);
  const Tensor input = as_contiguous(x);
  const OptionalTensor beta = row_vector(bias, "bias", size.width, x, gain.dtype, gain.like);
  const Tensor y = new_like(x);
  const Tensor mean = new_mean(rms, size, x), rstd = empty(size.leading, GPTLITE_FP32, x);
  GPTLITE_CALL(x, layer_norm_forward, mutable_data(y), mean_data(rms, mean), mutable_floats(rstd), data(input),
               data(gain.weight), data(beta), size.rows, size.width, float(eps), dtype, gain.dtype);
  return {y, mean, rstd};
}

Three layer_norm_backward(const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& mean,
                          const Tensor& rstd, bool has_bias) {
  const int dtype = float_dtype(x, "x");
  const Rows size(x, "x");
  const Gain gain(weight, has_bias, !mean, size, x);
  const Tensor gradient = contiguous_like(dy, "dy", x, "x"), input = as_contiguous(x);
  const OptionalTensor means = row_mean(mean, size, x);
  const Tensor rstds = row_statistic(rstd, "rstd", size, x);
  const Tensor dx = new_like(x), dweight = new_vector(gain.there(), size.width, gain.dtype, x);
  const Tensor dbias = new_vector(has_bias, size.width, gain.dtype, x), workspace = new_workspace(size, x);
  GPTLITE_CALL(x, layer_norm_backward, mutable_data(dx), data_if(gain.there(), dweight), data_if(has_bias, dbias),
               mutable_floats(workspace), data(gradient), data(input), data(gain.weight), floats(means), floats(rstds),
               size.rows, size.width, dtype, gain.dtype);
  return {dx, dweight, dbias};
}

Four residual_norm(const Tensor& x, const OptionalTensor& bias, const Tensor& residual, const OptionalTensor& weight,
                   const OptionalTensor& beta, double eps, double p, int64_t seed, const OptionalTensor& site,
                   const OptionalTensor& sample_ids, int64_t first_position, bool rms) {
  const int dtype = float_dtype(x, "x");
  const Rows size(x, "x");
  const Dropout dropout(p, seed, site, sample_ids, first_position, 0, x);
  const auto [batch, positions] = batch_and_positions(x, size, dropout);
  const Gain gain(weight, beta.has_value(), rms, size, x);
  const Tensor input = as_contiguous(x), stream = contiguous_like(residual, "residual", x, "x");
  const OptionalTensor added = row_vector(bias, "bias", size.width, x, gain.dtype, gain.like);
  const OptionalTensor shift = row_vector(beta, "beta", size.width, x, gain.dtype, gain.like);
  const Tensor y = new_like(x), h = new_like(x);
  const Tensor mean = new_mean(rms, size, x), rstd = empty(size.leading, GPTLITE_FP32, x);
  GPTLITE_CALL(x, residual_norm_forward, mutable_data(y), mutable_data(h), mean_data(rms, mean), mutable_floats(rstd),
               data(input), data(added), data(stream), data(gain.weight), data(shift), batch, positions, size.width,
               float(eps), dropout.get(), dtype, gain.dtype);
  return {y, h, mean, rstd};
}

Five residual_norm_backward(const Tensor& dy, const OptionalTensor& dh, const Tensor& h, const OptionalTensor& weight,
                            const OptionalTensor& mean, const Tensor& rstd, bool has_bias, bool has_beta, double p,
                            int64_t seed, const OptionalTensor& site, const OptionalTensor& sample_ids,
                            int64_t first_position) {
  const int dtype = float_dtype(h, "h");
  const Rows size(h, "h");
  const Dropout dropout(p, seed, site, sample_ids, first_position, 0, h);
  const bool drops = dropout.get();
  const auto [batch, positions] = batch_and_positions(h, size, dropout);
  const Gain gain(weight, has_beta, !mean, size, h);
  const Tensor gradient = contiguous_like(dy, "dy", h, "h"), input = as_contiguous(h);
  const OptionalTensor passed = dh ? OptionalTensor(contiguous_like(*dh, "dh", h, "h")) : std::nullopt;
  const OptionalTensor means = row_mean(mean, size, h);
  const Tensor rstds = row_statistic(rstd, "rstd", size, h);
  const Tensor dresidual = new_like(h), dx = drops ? new_like(h) : empty({0}, dtype, h);
  const Tensor dweight = new_vector(gain.there(), size.width, gain.dtype, h), workspace = new_workspace(size, h);
  const Tensor dbias = new_vector(has_bias, size.width, gain.dtype, h);
  const Tensor dbeta = new_vector(has_beta, size.width, gain.dtype, h);
  GPTLITE_CALL(h, residual_norm_backward, data_if(drops, dx), mutable_data(dresidual), data_if(has_bias, dbias),
               data_if(gain.there(), dweight), data_if(has_beta, dbeta), mutable_floats(workspace), data(gradient),
               data(passed), data(input), data(gain.weight), floats(means), floats(rstds), batch, positions, size.width,
               dropout.get(), dtype, gain.dtype);
  return {dx, dresidual, dbias, dweight, dbeta};
}

Tensor bias_gelu(const Tensor& x, const OptionalTensor& bias, bool tanh) {
  const int dtype = float_dtype(x, "x");
  const Rows size(x, "x");
  const Tensor input = as_contiguous(x), y = new_like(x);
  const OptionalTensor added = row_vector(bias, "bias", size.width, x, dtype, "x");
  GPTLITE_CALL(x, bias_gelu_forward, mutable_data(y), data(input), data(added), size.rows, size.width, int(tanh), dtype);
  return y;
}

Two bias_gelu_backward(const Tensor& dy, const Tensor& x, const OptionalTensor& bias, bool tanh) {
  const int dtype = float_dtype(x, "x");
  const Rows size(x, "x");
  const Tensor gradient = contiguous_like(dy, "dy", x, "x"), input = as_contiguous(x), dx = new_like(x);
  const OptionalTensor added = row_vector(bias, "bias", size.width, x, dtype, "x");
  const bool has_bias = added.has_value();
  const Tensor dbias = new_vector(has_bias, size.width, dtype, x), workspace = new_workspace(size, x);
  GPTLITE_CALL(x, bias_gelu_backward, mutable_data(dx), data_if(has_bias, dbias), mutable_floats(workspace),
               data(gradient), data(input), data(added), size.rows, size.width, int(tanh), dtype);
  return {dx, dbias};
}

Tensor dropout(const Tensor& x, double p, int64_t seed, const Tensor& site, const Tensor& sample_ids,
               int64_t first_position, int64_t first_head) {
  const int dtype = float_dtype(x, "x");
  STD_TORCH_CHECK(p > 0, "dropout without a p is no op; x itself is the result");
  const Dropout key(p, seed, site, sample_ids, first_position, first_head, x);
  const Tensor input = as_contiguous(x), y = new_like(x);
  const Sizes sizes = sizes_of(x);
  const bool has_heads = sizes.size() == 4;
  GPTLITE_CALL(x, dropout, mutable_data(y), data(input), sizes[0], has_heads ? sizes[1] : 1, sizes[sizes.size() - 2],
               sizes.back(), key.get(), dtype);
  return y;
}

GPTLITE_OPS(m) {
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("residual_norm", TORCH_BOX(&residual_norm));
  m.impl("residual_norm_backward", TORCH_BOX(&residual_norm_backward));
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  m.impl("dropout", TORCH_BOX(&dropout));
}

}  // namespace
}  // namespace gptlite::binding
