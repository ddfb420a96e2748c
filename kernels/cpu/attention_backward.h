// Backward pass of causal attention over blocks of queries and keys (FlashAttention, arXiv:2205.14135). The
// probabilities p are recomputed from the scores and their saved log sum exp. With delta = sum(dout * out) of a query:
//   dv = pᵀ dout,  ds = p * (dout vᵀ - delta),  dq = scale * ds k,  dk = scale * dsᵀ q
// A task computes one head. It loops over key blocks outside and query blocks inside, so every gradient is summed in a
// fixed order.
#pragma once

#include <math.h>
#include <stdint.h>

#include "attention.h"
#include "attention_blocks.h"
#include "attention_rows.h"
#include "exp2.h"
#include "parallel.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr int64_t kGradientKeys = 64;  // keys of a block of scores

template <class Math, class T>
class BackwardBlocks {
 public:
  BackwardBlocks(const AttentionShape& shape, Scratch& scratch)
      : shape_(shape), width_(round_up(shape.width, Math::kWidthStep)), rows_(shape, scratch) {
    const int64_t keys = round_up(shape.keys, Math::kRowStep), queries = round_up(shape.queries, Math::kQueryStep);
    const int64_t block = kQueryBlock * kGradientKeys, copies = Math::kOneForm ? 0 : 1;
    scratch.take(key_rows_, keys * width_);
    scratch.take(value_rows_, keys * width_);
    scratch.take(key_columns_, copies * round_up(keys, kGradientKeys) * width_);
    for (Operand* operand : {&q_, &dout_}) {
      scratch.take(operand->rows, queries * width_);
      scratch.take(operand->columns, round_up(queries, kQueryBlock) * width_);
      scratch.take(operand->right, copies * queries * width_);
    }
    scratch.take(lse_, queries);
    scratch.take(delta_, queries);
    scratch.take(dq_, round_up(queries, kQueryBlock) * width_);
    scratch.take(dk_, kGradientKeys * width_);
    scratch.take(dv_, kGradientKeys * width_);
    scratch.take(scores_, block);
    scratch.take(slopes_, block);
    scratch.take(p_rows_, block);
    scratch.take(ds_rows_, block);
    scratch.take(ds_right_, copies * block);
    scratch.take(spare_, kQueryBlock * width_);
  }

  void run(const BackwardHead<T>& head) {
    if (shape_.queries == 0 || !(shape_.scale > 0.0f) || !prepare(head)) return rows_.run(head);
    for (int64_t key = 0; key < shape_.keys; key += kGradientKeys) {
      const int64_t count = smaller(kGradientKeys, shape_.keys - key), rows = round_up(count, Math::kRowStep);
      const int64_t first = key > shape_.offset() ? (key - shape_.offset()) / kQueryBlock * kQueryBlock : 0;
      const int64_t end = smaller(key + count - 1 - shape_.offset() + shape_.window, shape_.queries);
      for (int64_t query = first; query < end; query += kQueryBlock) block(key, rows, query, query > first);
      if (first >= end) {  // keys before all windows
        memset(dk_, 0, count * width_ * sizeof *dk_);
        memset(dv_, 0, count * width_ * sizeof *dv_);
      }
      for (int64_t i = 0; i < count; ++i) {
        Math::store_row(head.dk.row(key + i), dk_ + i * width_, shape_.width, shape_.scale);
        Math::store_row(head.dv.row(key + i), dv_ + i * width_, shape_.width, 1.0f);
      }
    }
    for (int64_t query = 0; query < shape_.queries; query += kQueryBlock) {
      store_transposed<Math>(head.dq, query, smaller(kQueryBlock, shape_.queries - query), dq_ + query * width_, spare_,
                       lanes(query), shape_.width, width_, shape_.scale);
    }
  }

 private:
  using Element = typename Math::Element;
  struct Operand {
    Element *rows, *columns, *right;
  };

  // Returns the number of queries of a block, padded.
  int64_t lanes(int64_t query) const {
    return round_up(smaller(kQueryBlock, shape_.queries - query), Math::kQueryStep);
  }

  // Copies the operands of a head to scratch memory. Returns false if some element is not finite.
  bool prepare(const BackwardHead<T>& head) {
    const int64_t keys = round_up(shape_.keys, Math::kRowStep), width = shape_.width;
    const bool finite = load_rows<Math>(key_rows_, head.k, 0, shape_.keys, keys, width, width_) &
                        load_rows<Math>(value_rows_, head.v, 0, shape_.keys, keys, width, width_) &
                        load_queries(q_, head.q) & load_queries(dout_, head.dout);
    if (!finite) return false;
    for (int64_t key = 0; key < keys; key += kGradientKeys) {
      Math::prepare_columns(key_columns_ + key * width_, kGradientKeys, key_rows_ + key * width_,
                            smaller(kGradientKeys, keys - key), width_, spare_);
    }
    const int64_t queries = round_up(shape_.queries, Math::kQueryStep);
    for (int64_t query = 0; query < queries; ++query) {
      const bool real = query < shape_.queries;  // padded queries have probabilities exp(-inf) = 0
      lse_[query] = real ? head.lse[query] * kLog2e : INFINITY;
      delta_[query] = real ? Math::dot(head.dout.row(query), head.out.row(query), width) : 0.0f;
    }
    return true;
  }

  bool load_queries(const Operand& to, const Head<const T>& from) {
    const int64_t rows = round_up(shape_.queries, Math::kQueryStep);
    const bool finite = load_rows<Math>(to.rows, from, 0, shape_.queries, rows, shape_.width, width_);
    for (int64_t query = 0; query < rows; query += kQueryBlock) {
      const int64_t at = query * width_;
      Math::transposed(to.columns + at, kQueryBlock, to.rows + at, lanes(query), width_);
      Math::prepare_right(to.right + at, to.rows + at, lanes(query), width_);
    }
    return finite;
  }

  // Adds the contributions of one block of keys and queries to dq, dk and dv.
  void block(int64_t key, int64_t rows, int64_t query, bool add) {
    const int64_t at = query * width_, queries = lanes(query), depth = round_up(shape_.width, Math::kDepthStep);
    const auto keys = Math::left(key_rows_ + key * width_, width_);
    const auto values = Math::left(value_rows_ + key * width_, width_);
    Math::multiply(scores_, kQueryBlock, keys, q_.columns + at, kQueryBlock, rows, queries, depth, false);
    Math::multiply(slopes_, kQueryBlock, values, dout_.columns + at, kQueryBlock, rows, queries, depth, false);
    for (int64_t lane = 0; lane < queries; lane += kLanes) {
      gradients(lane, query, rows, query + lane + shape_.offset() - key);
    }
    Math::multiply(dv_, width_, Math::left(p_rows_, kQueryBlock), Math::right(dout_.right + at, dout_.rows + at),
                   width_, rows, width_, queries, add);
    Math::multiply(dk_, width_, Math::left(ds_rows_, kQueryBlock), Math::right(q_.right + at, q_.rows + at), width_,
                   rows, width_, queries, add);
    const auto columns = Math::columns(key_columns_ + key * width_, kGradientKeys, key_rows_ + key * width_, width_);
    Math::multiply(dq_ + at, kQueryBlock, columns, Math::right(ds_right_, ds_rows_), kQueryBlock, width_, queries, rows,
                   key / kGradientKeys > shape_.first_key(query) / kGradientKeys);
  }

  // Computes the probabilities p and the gradients of the scores ds, of kLanes queries. Keys before `first` and from
  // `some` on are seen by none of these queries, keys from `past` to `whole` by all. Rows are stored in pairs, as bf16
  // operands need.
  void gradients(int64_t lane, int64_t query, int64_t rows, int64_t bound) {
    const Vec lse = vector_at(lse_, query + lane), delta = vector_at(delta_, query + lane);
    const int64_t whole = clamped(bound + 1, 0, rows) / 2 * 2, some = round_up(clamped(bound + kLanes, 0, rows), 2);
    const int64_t left = bound - shape_.window, first = clamped(left + 1, 0, rows) / 2 * 2;
    const int64_t past = smaller(round_up(clamped(left + kLanes, 0, rows), 2), some);
    for (int64_t row = 0; row < first; row += 2) store_gradients(lane, row, Pair{}, Pair{});
    for (int64_t row = first; row < past; row += 2) edge(lane, row, bound, lse, delta);
    for (int64_t row = past; row < whole; row += 2) {
      const Pair a = gradient(lane, row, lse, delta), b = gradient(lane, row + 1, lse, delta);
      store_gradients(lane, row, a, b);
    }
    for (int64_t row = past > whole ? past : whole; row < some; row += 2) edge(lane, row, bound, lse, delta);
    for (int64_t row = some; row < rows; row += 2) store_gradients(lane, row, Pair{}, Pair{});
  }

  struct Pair {
    Vec p, ds;
  };
  static Vec vector_at(const float* numbers, int64_t at) { return load(numbers + at, All{}); }
  Pair gradient(int64_t lane, int64_t row, Vec lse, Vec delta) const {
    const Vec score = vector_at(scores_, row * kQueryBlock + lane);
    const Vec p = Math::exp2(fma(score, broadcast(shape_.scale * kLog2e), -lse));
    return {p, p * (vector_at(slopes_, row * kQueryBlock + lane) - delta)};
  }
  // Computes the gradients of two keys that not all of the queries see.
  void edge(int64_t lane, int64_t row, int64_t bound, Vec lse, Vec delta) {
    const Pair a = gradient(lane, row, lse, delta), b = gradient(lane, row + 1, lse, delta);
    store_gradients(lane, row, seen_of(a, row, bound), seen_of(b, row + 1, bound));
  }
  Pair seen_of(Pair pair, int64_t row, int64_t bound) const {
    return {seen_of(pair.p, row, bound), seen_of(pair.ds, row, bound)};
  }
  Vec seen_of(Vec x, int64_t row, int64_t bound) const {
    return where_seen(row, bound - shape_.window, Vec{}, where_seen(row, bound, x, Vec{}));
  }
  void store_gradients(int64_t lane, int64_t row, Pair a, Pair b) {
    Math::store_rows(p_rows_ + row * kQueryBlock + lane, kQueryBlock, a.p, b.p);
    Math::store_rows(ds_rows_ + row * kQueryBlock + lane, kQueryBlock, a.ds, b.ds);
    if (!Math::kOneForm) Math::store_right(ds_right_, kQueryBlock, row, lane, a.ds, b.ds);
  }

  const AttentionShape& shape_;
  const int64_t width_;  // padded
  [[maybe_unused]] typename Math::Unit unit_;
  BackwardRows<T> rows_;
  Element *key_rows_, *value_rows_, *key_columns_, *p_rows_, *ds_rows_, *ds_right_;
  Operand q_, dout_;
  // lse_ is in base 2. slopes_ has the gradients of the probabilities. dq_ is transposed within each block of queries.
  float *lse_, *delta_, *dq_, *dk_, *dv_, *scores_, *slopes_, *spare_;
};

template <class Math, class T>
static inline int backward_by_blocks(const GptliteHeads* dq, const GptliteHeads* dk, const GptliteHeads* dv,
                                     const GptliteHeads* dout, const GptliteHeads* out, const float* lse,
                                     const GptliteHeads* q, const GptliteHeads* k, const GptliteHeads* v,
                                     const AttentionShape& shape, void* context) {
  Scratch sizes;
  BackwardBlocks<Math, T>(shape, sizes);
  int status = 0;
  const auto body = [&](int64_t first, int64_t last) {
    Scratch scratch(sizes.bytes());
    if (scratch.empty()) {
      __atomic_store_n(&status, kOutOfMemory, __ATOMIC_RELAXED);
      return;
    }
    BackwardBlocks<Math, T> blocks(shape, scratch);
    for (int64_t task = first; task < last; ++task) {
      const int64_t b = task / shape.heads, h = task % shape.heads;
      blocks.run({{dq, b, h},  {dk, b, h},  {dv, b, h}, {dout, b, h}, {out, b, h}, lse + task * shape.queries,
                  {q, b, h}, {k, b, h}, {v, b, h}});
    }
  };
  parallel(context, shape.batch * shape.heads, task_items(shape.queries * shape.keys), body);
  return status;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
