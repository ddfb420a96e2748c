// Residual sum fused with the norm after it, forward and backward: h = residual + dropout(x + bias), and y = layer norm
// or RMS norm of h.
#include "amax.h"
#include "column_sums.h"
#include "norm.h"
#include "random_words.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

// Calls body(column, keep, lanes) over row `row` of [batch * positions, width]. keep(v) applies dropout to v, or
// returns v if `dropout` is NULL.
template <class Body>
GPTLITE_INLINE void for_dropout_columns(const GptliteDropout* dropout, int64_t row, int64_t positions, int64_t width,
                                        Body body) {
  if (dropout == nullptr) {
    for_columns<2>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
      body(column, [](Vec v) GPTLITE_LAMBDA { return v; }, lanes);
    });
    return;
  }
  const uint32_t threshold = dropout->threshold;
  const float scale = dropout->scale;
  const DropoutRow random_row = dropout_row(*dropout, row / positions, 0, row % positions);
  for_random_columns(random_row, width, [&](int64_t column, Words random, auto lanes) GPTLITE_LAMBDA {
    body(column, [&](Vec v) GPTLITE_LAMBDA { return dropped_out(v, random, threshold, scale); }, lanes);
  });
}

template <bool Rms, class T, class W>
struct Forward {
  T* y;
  T* h;
  const T* x;
  const W* bias;
  const T* residual;
  const W* weight;
  const W* beta;
  int64_t width;

  // Writes a row of h. Returns its approximate mean, which an RMS norm does not need.
  float sum_up(int64_t row, int64_t positions, const GptliteDropout* dropout) const {
    const int64_t start = row * width;
    Vec total = {};
    for_dropout_columns(dropout, row, positions, width, [&](int64_t column, auto keep, auto lanes) GPTLITE_LAMBDA {
      Vec branch = load(x + start + column, lanes);
      if (bias) branch += load(bias + column, lanes);
      const Vec whole = load(residual + start + column, lanes) + keep(branch);
      store(h + start + column, whole, lanes);
      if (!Rms) total += zero_past(whole, lanes);
    });
    return sum(total) / static_cast<float>(width);
  }

  Moments norm(int64_t row, float near_mean, float eps) const {
    const T* const sums = h + row * width;
    const Moments found = Rms ? rms_moments(sums, width, eps) : moments(sums, width, near_mean, eps);
    normalize<Rms>(y + row * width, sums, width, found, weight, beta);
    return found;
  }
};

template <bool Rms, class T, class W>
struct Backward {
  T* dx;
  T* dresidual;
  const T* dy;
  const T* dh;
  const T* h;
  const W* weight;
  int64_t width;

  // Computes dresidual and dx of a row, and adds its contribution to the column sums of the weight, beta and the bias.
  void row(int64_t row, int64_t positions, const GptliteDropout* dropout, float mean, float rstd, float* of_weight,
           float* of_beta, float* of_bias) const {
    const int64_t start = row * width;
    const NormSlope<Rms> slope = norm_slope<Rms>(dy + start, h + start, weight, width, mean, rstd);
    for_dropout_columns(dropout, row, positions, width, [&](int64_t column, auto keep, auto lanes) GPTLITE_LAMBDA {
      const int64_t at = start + column;
      const Vec upper = load(dy + at, lanes), normal = slope.normal(load(h + at, lanes));
      Vec whole = slope(weighted<Rms>(upper, weight, column, lanes), normal);
      if (dh) whole += load(dh + at, lanes);
      const Vec branch = keep(whole);
      // All loads come before the stores. A load whose address differs from an earlier store's by a multiple of the
      // page size would wait for that store.
      const Vec weight_sum = fma(upper, normal, load(of_weight + column, lanes));
      const Vec beta_sum = Rms ? Vec{} : load(of_beta + column, lanes) + upper;
      if (of_bias) store(of_bias + column, load(of_bias + column, lanes) + branch, lanes);
      store(of_weight + column, weight_sum, lanes);
      if (!Rms) store(of_beta + column, beta_sum, lanes);
      store(dresidual + at, whole, lanes);
      if (dx) store(dx + at, branch, lanes);
    });
  }
};

template <bool Rms, class T, class W>
void backward(const Backward<Rms, T, W>& pass, W* dbias, W* dweight, W* dbeta, float* workspace, const float* mean,
              const float* rstd, int64_t rows, int64_t positions, const GptliteDropout* dropout, const void* context) {
  const int64_t width = pass.width;
  const Parts parts = parts_of(rows, width);
  const int64_t each = parts.count * width;
  for_parts(context, parts, rows, [&](int64_t part, int64_t first, int64_t last) {
    float* const of_weight = workspace + part * width;
    for (int kind = 0; kind < 3; ++kind) memset(of_weight + kind * each, 0, static_cast<size_t>(width) * sizeof(float));
    for (int64_t row = first; row < last; ++row) {
      pass.row(row, positions, dropout, Rms ? 0.0f : mean[row], rstd[row], of_weight, of_weight + each,
               dbias ? of_weight + 2 * each : nullptr);
    }
  });
  if (dweight) sum_parts(context, dweight, workspace, parts.count, width);
  if (dbeta) sum_parts(context, dbeta, workspace + each, parts.count, width);
  if (dbias) sum_parts(context, dbias, workspace + 2 * each, parts.count, width);
}

}  // namespace

int residual_norm_forward(void* y, void* h, float* mean, float* rstd, const void* x, const void* bias,
                          const void* residual, const void* weight, const void* beta, int64_t batch, int64_t positions,
                          int64_t width, float eps, const GptliteDropout* dropout, int dtype, int weight_dtype, float* amax,
                          void* context) {
  return with_dtype(dtype, [&](auto element) {
    return with_dtype(weight_dtype, [&](auto weight_element) {
      return with_norm(mean == nullptr, [&](auto rms) {
        using T = decltype(element);
        using W = decltype(weight_element);
        constexpr bool Rms = decltype(rms)::value;
        const Forward<Rms, T, W> pass{static_cast<T*>(y),
                                      static_cast<T*>(h),
                                      static_cast<const T*>(x),
                                      static_cast<const W*>(bias),
                                      static_cast<const T*>(residual),
                                      static_cast<const W*>(weight),
                                      static_cast<const W*>(beta),
                                      width};
        parallel(context, batch * positions, task_items(width), [&](int64_t first, int64_t last) {
          for (int64_t row = first; row < last; ++row) {
            const Moments found = pass.norm(row, pass.sum_up(row, positions, dropout), eps);
            if (!Rms) mean[row] = found.mean;
            rstd[row] = found.rstd;
          }
        });
        raise_amax<T>(amax, y, batch * positions * width, context);
        return 0;
      });
    });
  });
}

int residual_norm_backward(void* dx, void* dresidual, void* dbias, void* dweight, void* dbeta, float* workspace,
                           const void* dy, const void* dh, const void* h, const void* weight, const float* mean,
                           const float* rstd, int64_t batch, int64_t positions, int64_t width,
                           const GptliteDropout* dropout, int dtype, int weight_dtype, float* amax, void* context) {
  return with_dtype(dtype, [&](auto element) {
    return with_dtype(weight_dtype, [&](auto weight_element) {
      return with_norm(mean == nullptr, [&](auto rms) {
        using T = decltype(element);
        using W = decltype(weight_element);
        const Backward<decltype(rms)::value, T, W> pass{
            static_cast<T*>(dx),       static_cast<T*>(dresidual), static_cast<const T*>(dy),
            static_cast<const T*>(dh), static_cast<const T*>(h),   static_cast<const W*>(weight),
            width};
        backward(pass, static_cast<W*>(dbias), static_cast<W*>(dweight), static_cast<W*>(dbeta), workspace, mean, rstd,
                 batch * positions, positions, dropout, context);
        raise_amax<T>(amax, dropout != nullptr ? dx : dresidual, batch * positions * width, context);
        return 0;
      });
    });
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
