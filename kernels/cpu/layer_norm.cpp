// Layer norm (arXiv:1607.06450) and RMS norm (arXiv:1910.07467) over rows, forward and backward.
#include "amax.h"
#include "column_sums.h"
#include "norm.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

template <bool Rms, class T, class W>
void forward(T* y, float* mean, float* rstd, const T* x, const W* weight, const W* bias, int64_t rows, int64_t width,
             float eps, const void* context) {
  parallel(context, rows, task_items(width), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* const in = x + row * width;
      const Moments found = Rms ? rms_moments(in, width, eps) : moments(in, width, mean_of(in, width), eps);
      if (!Rms) mean[row] = found.mean;
      rstd[row] = found.rstd;
      normalize<Rms>(y + row * width, in, width, found, weight, bias);
    }
  });
}

template <bool Rms, class T, class W>
void backward(T* dx, W* dweight, W* dbias, float* workspace, const T* dy, const T* x, const W* weight,
              const float* mean, const float* rstd, int64_t rows, int64_t width, const void* context) {
  const Parts parts = parts_of(rows, width);
  float* const weights = workspace;
  float* const biases = workspace + parts.count * width;
  for_parts(context, parts, rows, [&](int64_t part, int64_t first, int64_t last) {
    float* const of_weight = weights + part * width;
    float* const of_bias = biases + part * width;
    memset(of_weight, 0, static_cast<size_t>(width) * sizeof(float));
    memset(of_bias, 0, static_cast<size_t>(width) * sizeof(float));
    for (int64_t row = first; row < last; ++row) {
      const T* const slopes = dy + row * width;
      const T* const in = x + row * width;
      T* const out = dx + row * width;
      const NormSlope<Rms> slope = norm_slope<Rms>(slopes, in, weight, width, Rms ? 0.0f : mean[row], rstd[row]);
      for_columns<2>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
        const Vec upper = load(slopes + column, lanes), normal = slope.normal(load(in + column, lanes));
        // All loads come before the stores. A load whose address differs from an earlier store's by a multiple of the
        // page size would wait for that store.
        const Vec weight_sum = fma(upper, normal, load(of_weight + column, lanes));
        const Vec bias_sum = Rms ? Vec{} : load(of_bias + column, lanes) + upper;
        const Vec found = slope(weighted<Rms>(upper, weight, column, lanes), normal);
        store(of_weight + column, weight_sum, lanes);
        if (!Rms) store(of_bias + column, bias_sum, lanes);
        store(out + column, found, lanes);
      });
    }
  });
  if (dweight) sum_parts(context, dweight, weights, parts.count, width);
  if (dbias) sum_parts(context, dbias, biases, parts.count, width);
}

}  // namespace

int layer_norm_forward(void* y, float* mean, float* rstd, const void* x, const void* weight, const void* bias,
                       int64_t rows, int64_t width, float eps, int dtype, int weight_dtype, float* amax, void* context) {
  return with_dtype(dtype, [&](auto element) {
    return with_dtype(weight_dtype, [&](auto weight_element) {
      using T = decltype(element);
      using W = decltype(weight_element);
      return with_norm(mean == nullptr, [&](auto rms) {
        forward<decltype(rms)::value>(static_cast<T*>(y), mean, rstd, static_cast<const T*>(x),
                                      static_cast<const W*>(weight), static_cast<const W*>(bias), rows, width, eps,
                                      context);
        raise_amax<T>(amax, y, rows * width, context);
        return 0;
      });
    });
  });
}

int layer_norm_backward(void* dx, void* dweight, void* dbias, float* workspace, const void* dy, const void* x,
                        const void* weight, const float* mean, const float* rstd, int64_t rows, int64_t width,
                        int dtype, int weight_dtype, void* context) {
  return with_dtype(dtype, [&](auto element) {
    return with_dtype(weight_dtype, [&](auto weight_element) {
      using T = decltype(element);
      using W = decltype(weight_element);
      return with_norm(mean == nullptr, [&](auto rms) {
        backward<decltype(rms)::value>(static_cast<T*>(dx), static_cast<W*>(dweight), static_cast<W*>(dbias),
                                       workspace, static_cast<const T*>(dy), static_cast<const T*>(x),
                                       static_cast<const W*>(weight), mean, rstd, rows, width, context);
        return 0;
      });
    });
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
