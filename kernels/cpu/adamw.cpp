// AdamW (arXiv:1711.05101) and Adam (arXiv:1412.6980) over many tensors; gptlite_kernels.h has the formula. Operations
// are in the order of torch.optim, so results differ from it by one or two roundings.
#include <math.h>

#include <type_traits>

#include "gptlite_kernels.h"
#include "parallel.h"
#include "simd.h"
#include "tensor_line.h"

namespace gptlite {
namespace GPTLITE_ISA {
namespace {

constexpr int64_t kBlock = 4096;  // elements per task
constexpr int64_t kGrain = kTaskElements / kBlock;

struct Job {
  const GptliteAdam* tensors;
  int64_t num_tensors;
  double lr, beta1, beta2, eps, weight_decay;
  float scale;
};

auto counts_of(const Job& job) {
  return [&job](int64_t tensor) { return job.tensors[tensor].count; };
}

// Constants of a step, each broadcast to a vector.
struct Rule {
  float step;  // steps taken before this one
  Vec scale, weight_decay, kept, beta1, rest1, beta2, rest2, inverse_bias2, eps, step_size;
};

Rule rule_at(const Job& job, float step) {
  const double bias1 = 1 - ::pow(job.beta1, static_cast<double>(step) + 1);
  const double bias2 = 1 - ::pow(job.beta2, static_cast<double>(step) + 1);
  const auto constant = [](double value) { return broadcast(static_cast<float>(value)); };
  Rule rule;
  rule.step = step;
  rule.scale = broadcast(job.scale);
  rule.weight_decay = constant(job.weight_decay);
  rule.kept = constant(1 - job.lr * job.weight_decay);
  rule.beta1 = constant(job.beta1);
  rule.rest1 = constant(1 - job.beta1);
  rule.beta2 = constant(job.beta2);
  rule.rest2 = constant(1 - job.beta2);
  rule.inverse_bias2 = constant(1 / ::sqrt(bias2));
  rule.eps = constant(job.eps);
  rule.step_size = constant(job.lr / bias1);
  return rule;
}

// Updates elements first to last - 1 of a tensor. T is the type of the gradient. C is the type of the 16-bit copy of
// the parameters, or float for no copy.
template <bool adam, class T, class C>
void update(const Rule& shared, const GptliteAdam& tensor, int64_t first, int64_t last) {
  const Rule rule = shared;  // a local copy, because the stores below might alias `shared`
  const T* gradients = static_cast<const T*>(tensor.gradient) + first;
  constexpr bool copied = !std::is_same<C, float>::value;
  C* copies = copied ? static_cast<C*>(tensor.copy) + first : nullptr;
  float *parameters = tensor.parameter + first, *means = tensor.exp_avg + first, *squares = tensor.exp_avg_sq + first;
  for_columns<1>(last - first, [=](int64_t i, auto, auto lanes) GPTLITE_LAMBDA {
    const Vec p = load(parameters + i, lanes);
    Vec g = load(gradients + i, lanes) * rule.scale;
    if (adam) g = fma(rule.weight_decay, p, g);
    const Vec mean = fma(load(means + i, lanes), rule.beta1, g * rule.rest1);
    const Vec square = fma(load(squares + i, lanes), rule.beta2, g * g * rule.rest2);
    const Vec root = fma(sqrt(square), rule.inverse_bias2, rule.eps);
    store(means + i, mean, lanes);
    store(squares + i, square, lanes);
    const Vec change = rule.step_size * mean / root;
    const Vec written = adam ? p - change : fma(p, rule.kept, -change);
    store(parameters + i, written, lanes);
    if (copied) store(copies + i, written, lanes);
  });
}

// Updates elements first to last - 1 of the line of all tensors (tensor_line.h). The constants are computed again only
// where the step count changes from one tensor to the next.
template <bool adam, class T>
void update_line(const Job& job, int64_t first, int64_t last) {
  Rule rule = rule_at(job, 0);
  for_parts(job.num_tensors, counts_of(job), first, last, [&](int64_t i, int64_t from, int64_t to) {
    const GptliteAdam& tensor = job.tensors[i];
    if (*tensor.step != rule.step) rule = rule_at(job, *tensor.step);
    if (tensor.copy == nullptr)
      update<adam, T, float>(rule, tensor, from, to);
    else if (tensor.copy_dtype == GPTLITE_BF16)
      update<adam, T, Bf16>(rule, tensor, from, to);
    else
      update<adam, T, Half>(rule, tensor, from, to);
  });
}

template <bool adam>
int run(const Job& job, int dtype, void* context) {
  const int64_t elements = line_length(job.num_tensors, counts_of(job));
  return with_dtype(dtype, [&](auto type) {
    parallel(context, (elements + kBlock - 1) / kBlock, kGrain, [&](int64_t first, int64_t last) {
      update_line<adam, decltype(type)>(job, first * kBlock, last * kBlock);
    });
    return 0;
  });
}

}  // namespace

int adamw(const GptliteAdam* tensors, int64_t num_tensors, double lr, double beta1, double beta2, double eps,
          double weight_decay, int adam, const float* scale, const float* found_inf, const double* rate, int dtype,
          void* context) {
  if (found_inf != nullptr && *found_inf != 0) return 0;
  const Job job{tensors, num_tensors, rate == nullptr ? lr : *rate, beta1, beta2, eps, weight_decay,
                scale == nullptr ? 1.0f : *scale};
  const int error = adam ? run<true>(job, dtype, context) : run<false>(job, dtype, context);
  // The step counts change only now, because every task reads them.
  for (int64_t i = 0; error == 0 && i < num_tensors; ++i) *tensors[i].step += 1;
  return error;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
