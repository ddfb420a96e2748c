// Cross entropy with z-loss (formula: GptliteLoss in gptlite_kernels.h). The gradient, of type G, overwrites the logits,
// of type T, or is written elsewhere in e5m2.
//
// A row is processed in blocks that fit the L1 cache, with an online softmax (arXiv:1805.02867): the exponentials of a
// block are relative to the largest logit so far. They are computed once and kept in fp32 for the gradient: in place of
// fp32 logits, and for 16-bit logits in a buffer of one row, which stays in the L2 cache.
#include <math.h>
#include <stdlib.h>

#include "gptlite_kernels.h"
#include "parallel.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

constexpr int64_t kBlock = 1024;  // logits that fit the L1 cache, and whose exponentials fp32 sums accurately
// Distance of the software prefetch, in logits. Out-of-order execution alone would not fetch far enough ahead.
constexpr int64_t kAhead = 4 * kBlock;
constexpr int64_t kKept = 256;  // blocks of a row whose exponentials are kept: 262,144 logits
constexpr float kLowest = -0x1.fffffep127f;  // lowest finite fp32 number

// Statistics of a row: its maximum, and the sum of exp(logit - max).
struct Summary {
  float max = kLowest;  // if all logits are -inf, all exponentials are 0
  double exponentials = 0;

  double log_sum() const { return max + ::log(exponentials); }
};

template <class T>
GPTLITE_INLINE float largest(const T* x, int64_t count, float least) {
  Vec most[4];
  for (Vec& v : most) v = broadcast(least);
  for_columns<4>(count, [&](int64_t i, auto at, auto lanes) GPTLITE_LAMBDA {
    most[at] = max(fill_past(load(x + i, lanes), lanes, kLowest), most[at]);
  });
  return max_lane(max(max(most[0], most[1]), max(most[2], most[3])));
}

// Exponentials of a row. `kept` has those of all columns; for fp32 it is the row itself. relative_to has the number
// that was subtracted from the logits of each block.
struct Exponentials {
  float* kept;
  float relative_to[kKept];
};

// Computes the statistics of a row. If `keep`, also stores the exponentials in `written`. A logit of NaN or +inf makes
// the sum of exponentials NaN.
template <bool keep, class T>
Summary summarize(const T* row, int64_t columns, Exponentials* written) {
  Summary all;
  for (int64_t first = 0; first < columns; first += kBlock) {
    const T* const x = row + first;
    const int64_t count = columns - first < kBlock ? columns - first : kBlock;
    const float most = largest(x, count, all.max);
    if (most > all.max) {
      all.exponentials *= ::exp(static_cast<double>(all.max) - most);
      all.max = most;
    }
    float* const kept = keep ? written->kept + first : nullptr;
    if constexpr (keep) written->relative_to[first / kBlock] = all.max;
    Vec exponentials[4] = {};
    for_columns<4>(count, [&](int64_t i, auto at, auto lanes) GPTLITE_LAMBDA {
      __builtin_prefetch(x + i + kAhead);
      const Vec exponential = exp(fill_past(load(x + i, lanes), lanes, most) - most);
      if constexpr (keep) store(kept + i, exponential, lanes);
      exponentials[at] += zero_past(exponential, lanes);
    });
    all.exponentials += sum((exponentials[0] + exponentials[1]) + (exponentials[2] + exponentials[3]));
  }
  return all;
}

// Gradient of a row's loss: exp(x - shift) * factor, minus `peak` at column `target` unless that is -1.
struct Gradient {
  float shift, factor, peak;
  int64_t target;
};

// Returns the rounded product. A mere a * b may be compiled to one fused operation with a subtraction that follows.
GPTLITE_INLINE Vec product(Vec a, Vec b) { return fma(a, b, Vec{}); }

template <class T, class G>
void write_gradient(const T* x, G* out, int64_t columns, const Gradient& gradient) {
  const float shift = gradient.shift, factor = gradient.factor;
  const auto value = [=](Vec logits) GPTLITE_LAMBDA { return product(exp(logits - shift), broadcast(factor)); };
  // Compute the target's gradient first, because the loop overwrites its logit.
  const Vec at_target = gradient.target < 0 ? Vec{} : value(load(x + gradient.target, First{1})) - gradient.peak;
  for_columns<2>(columns, [=](int64_t i, auto, auto lanes) GPTLITE_LAMBDA {
    store(out + i, value(load(x + i, lanes)), lanes);
  });
  if (gradient.target >= 0) store(out + gradient.target, at_target, First{1});
}

// Writes the same gradient from the exponentials that `summarize` has stored.
template <class G>
void scale_gradient(G* row, int64_t columns, const Gradient& gradient, const Exponentials& written) {
  for (int64_t first = 0; first < columns; first += kBlock) {
    G* const x = row + first;
    const float* const kept = written.kept + first;
    const int64_t count = columns - first < kBlock ? columns - first : kBlock, target = gradient.target - first;
    const double moved = ::exp(static_cast<double>(written.relative_to[first / kBlock]) - gradient.shift);
    const Vec factor = broadcast(static_cast<float>(moved * gradient.factor));
    const bool has_target = target >= 0 && target < count;
    const Vec at_target = has_target ? product(load(kept + target, First{1}), factor) - gradient.peak : Vec{};
    for_columns<4>(count, [=](int64_t i, auto, auto lanes) GPTLITE_LAMBDA {
      store(x + i, load(kept + i, lanes) * factor, lanes);
    });
    if (has_target) store(x + target, at_target, First{1});
  }
}

// Returns the column of a target, or -1 if the target is ignored or not among the columns.
int64_t column_of(int64_t target, int64_t columns, const GptliteLoss& loss) {
  if (target == loss.ignore_index || target < loss.first) return -1;
  const uint64_t column = static_cast<uint64_t>(target) - static_cast<uint64_t>(loss.first);
  return column < static_cast<uint64_t>(columns) ? static_cast<int64_t>(column) : -1;
}

// Returns the gradient's parameters, for probabilities that are exp(x - shift) * factor.
Gradient gradient_of(const GptliteLoss& loss, float shift, double factor, double log_sum, int64_t column) {
  const double z = 1 + 2 * static_cast<double>(loss.z_loss) * log_sum;
  return {shift, static_cast<float>(factor * z * loss.scale), loss.scale, column};
}

float loss_of(const Summary& row, float target, const GptliteLoss& loss) {
  // Use differences from `max`, because large logits would cancel the digits of a small loss.
  const double log_sum = row.log_sum();
  double value = ::log(row.exponentials) - (static_cast<double>(target) - row.max);
  if (loss.z_loss != 0) value += loss.z_loss * log_sum * log_sum;
  return static_cast<float>(value);
}

// Returns the loss of a row x and, if wanted, writes its gradient to `out`, which may be x. A target that is neither ignored nor
// a column is an error of the caller and gives NaN. `room` is a buffer for the exponentials of a row, or NULL.
template <class T, class G>
float row_loss(T* x, G* out, int64_t target, int64_t columns, const GptliteLoss& loss, bool want_gradient,
               float* room) {
  if (target == loss.ignore_index) {
    if (want_gradient) memset(out, 0, static_cast<size_t>(columns) * sizeof(G));
    return 0;
  }
  const int64_t column = column_of(target, columns, loss);
  if (column < 0) return __builtin_nanf("");
  const float logit = to_float(x[column]);
  if constexpr (sizeof(T) == sizeof(float)) room = x;
  if (want_gradient && room != nullptr && columns <= kKept * kBlock) {
    Exponentials written;
    written.kept = room;
    const Summary row = summarize<true>(x, columns, &written);
    scale_gradient(out, columns, gradient_of(loss, row.max, 1 / row.exponentials, row.log_sum(), column), written);
    return loss_of(row, logit, loss);
  }
  const Summary row = summarize<false>(x, columns, nullptr);
  if (want_gradient) {
    write_gradient(x, out, columns, gradient_of(loss, row.max, 1 / row.exponentials, row.log_sum(), column));
  }
  return loss_of(row, logit, loss);
}

// Calls f(row of the gradient) for a row x: x itself, or a row in e5m2.
template <class T, class F>
void with_gradient(T* x, int64_t row, const GptliteLoss& loss, F f) {
  if constexpr (sizeof(T) == sizeof(Bf16)) {
    if (loss.gradient != nullptr) return f(reinterpret_cast<E5m2*>(loss.gradient) + row * loss.gradient_stride);
  }
  f(x);
}

}  // namespace

int cross_entropy(float* losses, void* logits, int64_t row_stride, const int64_t* targets, int64_t rows, int64_t columns,
                  const GptliteLoss* loss, int want_gradient, int dtype, void* context) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const bool beside = want_gradient != 0 && sizeof(T) < sizeof(float) && columns <= kKept * kBlock;
    parallel(context, rows, task_items(columns), [&](int64_t first, int64_t last) {
      void* const room = beside ? malloc(static_cast<size_t>(columns) * sizeof(float)) : nullptr;
      for (int64_t row = first; row < last; ++row) {
        T* x = static_cast<T*>(logits) + row * row_stride;
        with_gradient(x, row, *loss, [&](auto* out) {
          losses[row] = row_loss(x, out, targets[row], columns, *loss, want_gradient != 0, static_cast<float*>(room));
        });
      }
      free(room);
    });
    return 0;
  });
}

int cross_entropy_stats(float* stats, const void* logits, int64_t row_stride, const int64_t* targets, int64_t rows,
                        int64_t columns, const GptliteLoss* loss, int dtype, void* context) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    parallel(context, rows, task_items(columns), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const T* x = static_cast<const T*>(logits) + row * row_stride;
        const Summary summary = summarize<false>(x, columns, nullptr);
        const int64_t column = column_of(targets[row], columns, *loss);
        stats[2 * row] = static_cast<float>(summary.log_sum());
        stats[2 * row + 1] = column < 0 ? 0 : to_float(x[column]);
      }
    });
    return 0;
  });
}

int cross_entropy_gradient(void* logits, int64_t row_stride, const int64_t* targets, const float* log_sum, int64_t rows,
                           int64_t columns, const GptliteLoss* loss, int dtype, void* context) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    parallel(context, rows, task_items(columns), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        T* x = static_cast<T*>(logits) + row * row_stride;
        with_gradient(x, row, *loss, [&](auto* out) {
          if (targets[row] == loss->ignore_index) {
            memset(out, 0, static_cast<size_t>(columns) * sizeof(*out));
          } else {
            const int64_t column = column_of(targets[row], columns, *loss);
            write_gradient(x, out, columns, gradient_of(*loss, log_sum[row], 1, log_sum[row], column));
          }
        });
      }
    });
    return 0;
  });
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
