// Attention one query at a time, which reads only the keys and values that the query sees. Used for few queries, for a
// scale that is not positive, and for inputs with infinities or NaN: the block algorithm would multiply these by the
// probability 0 of a hidden key, which gives NaN.
#pragma once

#include <math.h>
#include <stdint.h>

#include "attention.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

template <class A, class B>
static inline float dot(const A* a, const B* b, int64_t width) {
  Vec total{};
  for_columns<1>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    total = fma(load(a + column, lanes), load(b + column, lanes), total);
  });
  return sum(total);
}

// Computes to += factor * x.
template <class T>
static inline void add_scaled(float* to, float factor, const T* x, int64_t width) {
  const Vec factors = broadcast(factor);
  for_columns<1>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    store(to + column, fma(factors, load(x + column, lanes), load(to + column, lanes)), lanes);
  });
}

template <class T>
static inline void store_scaled(T* to, float factor, const float* x, int64_t width) {
  for_columns<1>(width, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    store(to + column, load(x + column, lanes) * factor, lanes);
  });
}

// Replaces x by exp(x - shift) and returns the sum.
static inline float exponentials(float* x, float shift, int64_t count) {
  Vec total{};
  for_columns<1>(count, [&](int64_t column, auto, auto lanes) GPTLITE_LAMBDA {
    const Vec p = exp(load(x + column, lanes) - shift);
    store(x + column, p, lanes);
    total = total + zero_past(p, lanes);
  });
  return sum(total);
}

template <class T>
class ForwardRows {
 public:
  ForwardRows(const AttentionShape& shape, Scratch& scratch) : shape_(shape) {
    scratch.take(scores_, shape.keys);
    scratch.take(sum_, shape.width);
  }

  void run(const ForwardHead<T>& head, int64_t first, int64_t last) {
    for (int64_t query = first; query < last; ++query) {
      const int64_t begin = shape_.first_key(query), keys = query + shape_.offset() + 1;
      float maximum = -INFINITY;
      for (int64_t key = begin; key < keys; ++key) {
        const float score = dot(head.q.row(query), head.k.row(key), shape_.width) * shape_.scale;
        scores_[key] = score;
        maximum = score > maximum ? score : maximum;
      }
      const float total = exponentials(scores_ + begin, maximum, keys - begin);
      memset(sum_, 0, shape_.width * sizeof *sum_);
      for (int64_t key = begin; key < keys; ++key) add_scaled(sum_, scores_[key], head.v.row(key), shape_.width);
      store_scaled(head.out.row(query), 1.0f / total, sum_, shape_.width);
      head.lse[query] = maximum + logf(total);
    }
  }

 private:
  const AttentionShape& shape_;
  float *scores_, *sum_;
};

template <class T>
class BackwardRows {
 public:
  BackwardRows(const AttentionShape& shape, Scratch& scratch) : shape_(shape) {
    scratch.take(dq_, shape.width);
    scratch.take(dk_, shape.keys * shape.width);
    scratch.take(dv_, shape.keys * shape.width);
  }

  void run(const BackwardHead<T>& head) {
    const int64_t width = shape_.width;
    memset(dk_, 0, shape_.keys * width * sizeof *dk_);
    memset(dv_, 0, shape_.keys * width * sizeof *dv_);
    for (int64_t query = 0; query < shape_.queries; ++query) {
      const float delta = dot(head.dout.row(query), head.out.row(query), width);
      memset(dq_, 0, width * sizeof *dq_);
      for (int64_t key = shape_.first_key(query); key <= query + shape_.offset(); ++key) {
        float p = dot(head.q.row(query), head.k.row(key), width) * shape_.scale;
        exponentials(&p, head.lse[query], 1);
        const float slope = p * (dot(head.dout.row(query), head.v.row(key), width) - delta);
        add_scaled(dq_, slope, head.k.row(key), width);
        add_scaled(dk_ + key * width, slope, head.q.row(query), width);
        add_scaled(dv_ + key * width, p, head.dout.row(query), width);
      }
      store_scaled(head.dq.row(query), shape_.scale, dq_, width);
    }
    for (int64_t key = 0; key < shape_.keys; ++key) {
      store_scaled(head.dk.row(key), shape_.scale, dk_ + key * width, width);
      store_scaled(head.dv.row(key), 1.0f, dv_ + key * width, width);
    }
  }

 private:
  const AttentionShape& shape_;
  float *dq_, *dk_, *dv_;
};

}  // namespace GPTLITE_ISA
}  // namespace gptlite
