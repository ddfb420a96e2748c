// Layer norm and RMS norm, alone and after a residual sum; bias and activation; rotary position embedding; dropout.
#include "common.h"

namespace gptlite::binding {
namespace {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Returns a contiguous vector of a row's width on the device of `like`. The caller checks its dtype.
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

// Returns a contiguous statistic (mean or rstd), which has a float for each row.
Tensor row_statistic(const Tensor& statistic, const char* name, const Rows& size, const Tensor& like) {
  check_device(statistic, name, like);
  check_fp32(statistic, name);
  check_sizes(statistic, name, size.leading);
  return as_contiguous(statistic);
}

Tensor new_workspace(const Rows& size, const Tensor& like) {
  return empty({gptlite_rows_workspace(size.rows, size.width)}, GPTLITE_FP32, like);
}

// Returns an empty gradient of a parameter of a row's width. It has no elements if there is no such parameter.
Tensor new_vector(bool wanted, int64_t width, int dtype, const Tensor& like) {
  return empty({wanted ? width : 0}, dtype, like);
}

void* data_if(bool wanted, const Tensor& tensor) { return wanted ? mutable_data(tensor) : nullptr; }

// Key of a dropout mask, and the tensors to which it points.
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

  // NULL without dropout.
  const GptliteDropout* get() const { return site_ ? &key_ : nullptr; }

 private:
  OptionalTensor site_, sample_ids_;
  GptliteDropout key_{};
};

// Returns the batch and positions of x. Without dropout only their product matters, so x may have any dims.
std::tuple<int64_t, int64_t> batch_and_positions(const Tensor& x, const Rows& size, const Dropout& dropout) {
  if (!dropout.get()) return {1, size.rows};
  STD_TORCH_CHECK(x.dim() == 3, "with dropout x must be [B, S, C], not ", text(sizes_of(x)));
  return {x.size(0), x.size(1)};
}

// Weight of a norm, and the dtype of the norm's parameters, which is that of x if there is no weight.
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

// Returns an empty mean. For an RMS norm it has no elements, and `mean_data` is NULL.
Tensor new_mean(bool rms, const Rows& size, const Tensor& x) {
  return empty(rms ? Sizes{0} : size.leading, GPTLITE_FP32, x);
}

float* mean_data(bool rms, const Tensor& mean) { return rms ? nullptr : mutable_floats(mean); }

OptionalTensor row_mean(const OptionalTensor& mean, const Rows& size, const Tensor& like) {
  return mean ? OptionalTensor(row_statistic(*mean, "mean", size, like)) : std::nullopt;
}

Three layer_norm(float* amax, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool rms) {
  const int dtype = float_dtype(x, "x");
  const Rows size(x, "x");
  const Gain gain(weight, bias.has_value(), rms, size, x);
  const Tensor input = as_contiguous(x);
  const OptionalTensor beta = row_vector(bias, "bias", size.width, x, gain.dtype, gain.like);
  const Tensor y = new_like(x);
  const Tensor mean = new_mean(rms, size, x), rstd = empty(size.leading, GPTLITE_FP32, x);
  GPTLITE_CALL(x, layer_norm_forward, mutable_data(y), mean_data(rms, mean), mutable_floats(rstd), data(input),
               data(gain.weight), data(beta), size.rows, size.width, float(eps), dtype, gain.dtype, amax);
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

Four residual_norm(float* amax, const Tensor& x, const OptionalTensor& bias, const Tensor& residual, const OptionalTensor& weight,
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
               float(eps), dropout.get(), dtype, gain.dtype, amax);
  return {y, h, mean, rstd};
}

Five residual_norm_backward(float* amax, const Tensor& dy, const OptionalTensor& dh, const Tensor& h, const OptionalTensor& weight,
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
               dropout.get(), dtype, gain.dtype, amax);
  return {dx, dresidual, dbias, dweight, dbeta};
}

// Returns the sizes of an activation's result, which is half as wide as x if the activation is gated.
Sizes activated_sizes(const Tensor& x, int64_t kind) {
  STD_TORCH_CHECK(kind >= GPTLITE_GELU_TANH && kind <= GPTLITE_GEGLU, "kind must be 0 to 5, not ", kind);
  Sizes sizes = sizes_of(x);
  if (kind < GPTLITE_SWIGLU) return sizes;
  STD_TORCH_CHECK(sizes.back() % 2 == 0, "x of a gated activation must be [.., 2 F], not ", text(sizes));
  sizes.back() /= 2;
  return sizes;
}

std::tuple<Tensor> bias_activation(float* amax, const Tensor& x, const OptionalTensor& bias, int64_t kind) {
  const int dtype = float_dtype(x, "x");
  const Rows size(x, "x");
  const Sizes sizes = activated_sizes(x, kind);
  const Tensor input = as_contiguous(x), y = empty(sizes, dtype, x);
  const OptionalTensor added = row_vector(bias, "bias", size.width, x, dtype, "x");
  GPTLITE_CALL(x, bias_activation_forward, mutable_data(y), data(input), data(added), size.rows, sizes.back(), int(kind),
               dtype, amax);
  return {y};
}

Two bias_activation_backward(float* amax, const Tensor& dy, const Tensor& x, const OptionalTensor& bias, int64_t kind) {
  const int dtype = float_dtype(x, "x");
  const Rows size(x, "x");
  const Sizes sizes = activated_sizes(x, kind);
  check_device(dy, "dy", x);
  check_dtype(dy, "dy", dtype, "x");
  check_sizes(dy, "dy", sizes);
  const Tensor gradient = as_contiguous(dy), input = as_contiguous(x), dx = new_like(x);
  const OptionalTensor added = row_vector(bias, "bias", size.width, x, dtype, "x");
  const bool has_bias = added.has_value();
  const Tensor dbias = new_vector(has_bias, size.width, dtype, x), workspace = new_workspace(size, x);
  GPTLITE_CALL(x, bias_activation_backward, mutable_data(dx), data_if(has_bias, dbias), mutable_floats(workspace),
               data(gradient), data(input), data(added), size.rows, sizes.back(), int(kind), dtype, amax);
  return {dx, dbias};
}

// Checked sizes of qkv [B, S, groups, queries + 2, width], with the gains of its norms and the angles of its rotation.
class Heads {
 public:
  Heads(const Tensor& qkv, const OptionalTensor& cos, const OptionalTensor& sin, const OptionalTensor& q_gain,
        const OptionalTensor& k_gain, std::optional<double> eps)
      : dtype(float_dtype(qkv, "qkv")), gain_dtype(dtype), eps(eps ? float(*eps) : -1.0f) {
    STD_TORCH_CHECK(qkv.dim() == 5 && qkv.size(3) > 2, "qkv must be [B, S, K, G + 2, D], not ", text(sizes_of(qkv)));
    STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "cos and sin go together");
    STD_TORCH_CHECK(cos || (eps && *eps >= 0), "rope needs angles, or an eps of a norm, which is at least 0");
    STD_TORCH_CHECK(eps || !(q_gain || k_gain), "gains need an eps");
    tokens = qkv.size(0) * qkv.size(1), groups = qkv.size(2), queries = qkv.size(3) - 2, width = qkv.size(4);
    STD_TORCH_CHECK(!cos || width % 2 == 0, "a rotation needs heads of an even width, not ", width);
    this->cos = row_angles(cos, "cos", qkv);
    this->sin = row_angles(sin, "sin", qkv);
    angles = cos ? cos->size(0) * cos->size(1) : 0;
    if (q_gain || k_gain) gain_dtype = float_dtype(q_gain ? *q_gain : *k_gain, "the gain");
    STD_TORCH_CHECK(gain_dtype == dtype || gain_dtype == GPTLITE_FP32, "gains must be of the dtype of qkv, or float32");
    this->q_gain = row_vector(q_gain, "q_gain", width, qkv, gain_dtype, "the other gain");
    this->k_gain = row_vector(k_gain, "k_gain", width, qkv, gain_dtype, "the other gain");
  }

  int64_t tokens, groups, queries, width, angles;
  OptionalTensor cos, sin, q_gain, k_gain;
  int dtype, gain_dtype;
  float eps;

 private:
  static OptionalTensor row_angles(const OptionalTensor& angles, const char* name, const Tensor& qkv) {
    if (!angles) return std::nullopt;
    check_device(*angles, name, qkv);
    check_fp32(*angles, name);
    const int64_t batch = angles->dim() > 0 && angles->size(0) == 1 ? 1 : qkv.size(0);
    check_sizes(*angles, name, {batch, qkv.size(1), 1, 1, qkv.size(4) / 2});
    return as_contiguous(*angles);
  }
};

Tensor rope(const Tensor& qkv, const OptionalTensor& cos, const OptionalTensor& sin, const OptionalTensor& q_gain,
            const OptionalTensor& k_gain, std::optional<double> eps) {
  const Heads heads(qkv, cos, sin, q_gain, k_gain, eps);
  const Tensor input = as_contiguous(qkv), out = new_like(qkv);
  GPTLITE_CALL(qkv, rope_forward, mutable_data(out), data(input), floats(heads.cos), floats(heads.sin),
               data(heads.q_gain), data(heads.k_gain), heads.tokens, heads.angles, heads.groups, heads.queries,
               heads.width, heads.eps, heads.dtype, heads.gain_dtype);
  return out;
}

Three rope_backward(const Tensor& dout, const OptionalTensor& qkv, const OptionalTensor& cos,
                    const OptionalTensor& sin, const OptionalTensor& q_gain, const OptionalTensor& k_gain,
                    std::optional<double> eps) {
  const Heads heads(dout, cos, sin, q_gain, k_gain, eps);
  STD_TORCH_CHECK(qkv || !eps, "the gradient of a norm needs qkv");
  const Tensor gradient = as_contiguous(dout), dqkv = new_like(dout);
  const OptionalTensor input = qkv ? OptionalTensor(contiguous_like(*qkv, "qkv", dout, "dout")) : std::nullopt;
  const bool has_q = q_gain.has_value(), has_k = k_gain.has_value();
  const Tensor dq_gain = new_vector(has_q, heads.width, has_q ? heads.gain_dtype : heads.dtype, dout);
  const Tensor dk_gain = new_vector(has_k, heads.width, has_k ? heads.gain_dtype : heads.dtype, dout);
  const Tensor workspace = has_q || has_k ? new_workspace(Rows(dout, "dout"), dout) : empty({0}, GPTLITE_FP32, dout);
  GPTLITE_CALL(dout, rope_backward, mutable_data(dqkv), data_if(has_q, dq_gain), data_if(has_k, dk_gain),
               mutable_floats(workspace), data(gradient), data(input), floats(heads.cos), floats(heads.sin),
               data(heads.q_gain), data(heads.k_gain), heads.tokens, heads.angles, heads.groups, heads.queries,
               heads.width, heads.eps, heads.dtype, heads.gain_dtype);
  return {dqkv, dq_gain, dk_gain};
}

Two join_heads(const Tensor& dq, const Tensor& dk, const Tensor& dv, bool bias, bool fp32) {
  const int dtype = float_dtype(dq, "dq"), bias_dtype = fp32 ? GPTLITE_FP32 : dtype;
  STD_TORCH_CHECK(dq.dim() == 4 && dk.dim() == 4, "dq and dk must be [B, S, heads, D], not ", text(sizes_of(dq)),
                  " and ", text(sizes_of(dk)));
  const int64_t groups = dk.size(2), queries = groups == 0 ? 0 : dq.size(2) / groups, width = dq.size(3);
  check_sizes(dk, "dk", {dq.size(0), dq.size(1), groups, width});
  STD_TORCH_CHECK(groups * queries == dq.size(2), "dq must have a multiple of dk's ", groups, " heads, not ", dq.size(2));
  check_device(dk, "dk", dq);
  check_dtype(dk, "dk", dtype, "dq");
  const Tensor q = as_contiguous(dq), k = as_contiguous(dk), v = contiguous_like(dv, "dv", dk, "dk");
  const Tensor dqkv = empty({dq.size(0), dq.size(1), groups, queries + 2, width}, dtype, dq);
  const int64_t tokens = dq.size(0) * dq.size(1), columns = groups * (queries + 2) * width;
  const Tensor dbias = new_vector(bias, columns, bias_dtype, dq);
  const Tensor workspace = empty({gptlite_rows_workspace(tokens, columns)}, GPTLITE_FP32, dq);
  GPTLITE_CALL(dq, join_heads, mutable_data(dqkv), data_if(bias, dbias), mutable_floats(workspace), data(q), data(k),
               data(v), tokens, groups, queries, width, dtype, bias_dtype);
  return {dqkv, dbias};
}

void add_token_rows_(const Tensor& table, const Tensor& dy, const Tensor& tokens, const Tensor& order) {
  const int dtype = float_dtype(dy, "dy");
  check_fp32(table, "table");
  check_in_place(table, "table");
  STD_TORCH_CHECK(table.dim() == 2 && dy.dim() == 2 && dy.size(1) == table.size(1),
                  "table and dy must be matrices of the same width, not ", text(sizes_of(table)), " and ",
                  text(sizes_of(dy)));
  for (const Tensor* places : {&tokens, &order}) {
    check_device(*places, "tokens or order", table);
    check_int64(*places, "tokens or order");
    check_sizes(*places, "tokens or order", {dy.size(0)});
  }
  check_device(dy, "dy", table);
  const Tensor rows = as_contiguous(dy), sorted = as_contiguous(tokens), at = as_contiguous(order);
  GPTLITE_CALL(table, add_token_rows, mutable_floats(table), data(rows), integers(sorted), integers(at), dy.size(0),
               dy.size(1), dtype);
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

// Two ops of one function: without the amax of its result, and with it as a further result, an fp32 scalar.
template <auto function>
struct Op;

template <typename... Results, typename First, typename... Others,
          std::tuple<Results...> (*function)(float* amax, First, Others...)>
struct Op<function> {
  static auto plain(First first, Others... others) {
    auto results = function(nullptr, first, others...);
    if constexpr (sizeof...(Results) == 1) return std::get<0>(results);
    else return results;
  }

  static std::tuple<Results..., Tensor> amax(First first, Others... others) {
    Tensor largest = empty({}, GPTLITE_FP32, first);
    torch::stable::zero_(largest);
    return std::tuple_cat(function(mutable_floats(largest), first, others...), std::make_tuple(largest));
  }
};

GPTLITE_OPS(m) {
  m.impl("layer_norm", TORCH_BOX(&Op<&layer_norm>::plain));
  m.impl("layer_norm_amax", TORCH_BOX(&Op<&layer_norm>::amax));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("residual_norm", TORCH_BOX(&Op<&residual_norm>::plain));
  m.impl("residual_norm_amax", TORCH_BOX(&Op<&residual_norm>::amax));
  m.impl("residual_norm_backward", TORCH_BOX(&Op<&residual_norm_backward>::plain));
  m.impl("residual_norm_amax_backward", TORCH_BOX(&Op<&residual_norm_backward>::amax));
  m.impl("bias_activation", TORCH_BOX(&Op<&bias_activation>::plain));
  m.impl("bias_activation_amax", TORCH_BOX(&Op<&bias_activation>::amax));
  m.impl("bias_activation_backward", TORCH_BOX(&Op<&bias_activation_backward>::plain));
  m.impl("bias_activation_amax_backward", TORCH_BOX(&Op<&bias_activation_backward>::amax));
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("rope_backward", TORCH_BOX(&rope_backward));
  m.impl("join_heads", TORCH_BOX(&join_heads));
  m.impl("add_token_rows_", TORCH_BOX(&add_token_rows_));
  m.impl("dropout", TORCH_BOX(&dropout));
}

}  // namespace
}  // namespace gptlite::binding
