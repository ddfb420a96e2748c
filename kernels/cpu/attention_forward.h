// Forward pass of causal attention over blocks of queries and keys (FlashAttention, arXiv:2205.14135), with an online
// softmax: exponentials are relative to the largest score so far, and earlier sums are rescaled when the maximum grows.
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

constexpr int64_t kKeyBlock = 128;   // keys of a block of scores
constexpr int64_t kFewQueries = 4;   // minimum for the block algorithm
constexpr int64_t kQueryTask = 512;  // queries of a task, which prepares their keys and values once

template <class Math, class T>
class ForwardBlocks {
 public:
  ForwardBlocks(const AttentionShape& shape, Scratch& scratch)
      : shape_(shape), width_(round_up(shape.width, Math::kWidthStep)), rows_(shape, scratch) {
    const int64_t keys = round_up(shape.keys, Math::kRowStep);
    scratch.take(key_rows_, keys * width_);
    scratch.take(value_rows_, keys * width_);
    scratch.take(value_columns_, Math::kOneForm ? 0 : round_up(keys, kKeyBlock) * width_);
    scratch.take(query_rows_, kQueryBlock * width_);
    scratch.take(query_columns_, kQueryBlock * width_);
    scratch.take(scores_, kQueryBlock * kKeyBlock);
    scratch.take(probabilities_, kQueryBlock * kKeyBlock);
    scratch.take(out_columns_, kQueryBlock * width_);
    scratch.take(out_rows_, kQueryBlock * width_);
    scratch.take(shift_, kQueryBlock);
    scratch.take(total_, kQueryBlock);
  }

  // Computes queries first to last - 1 of a head.
  void run(const ForwardHead<T>& head, int64_t first, int64_t last) {
    if (last - first < kFewQueries || !(shape_.scale > 0.0f)) return rows_.run(head, first, last);
    const int64_t keys = last + shape_.offset(), rows = round_up(keys, Math::kRowStep);
    const int64_t begin = shape_.first_key(first) / kKeyBlock * kKeyBlock, at = begin * width_;
    load_rows<Math>(key_rows_ + at, head.k, begin, keys - begin, rows - begin, shape_.width, width_);
    if (!load_rows<Math>(value_rows_ + at, head.v, begin, keys - begin, rows - begin, shape_.width, width_)) {
      return rows_.run(head, first, last);
    }
    for (int64_t key = begin; key < rows; key += kKeyBlock) {
      Math::prepare_columns(value_columns_ + key * width_, kKeyBlock, value_rows_ + key * width_,
                            smaller(kKeyBlock, rows - key), width_, out_rows_);
    }
    for (int64_t query = first; query < last; query += kQueryBlock) {
      const int64_t count = smaller(kQueryBlock, last - query);
      block(head.q, query, count);
      finish(head, query, count);
    }
  }

 private:
  using Element = typename Math::Element;

  // Computes the unnormalized output of a block of `count` queries, transposed, over all keys that they see.
  void block(const Head<const T>& q, int64_t query, int64_t count) {
    lanes_ = round_up(count, Math::kQueryStep);
    load_rows<Math>(query_rows_, q, query, count, lanes_, shape_.width, width_);
    Math::transposed(query_columns_, kQueryBlock, query_rows_, lanes_, width_);
    const int64_t begin = shape_.first_key(query) / Math::kRowStep * Math::kRowStep;
    const int64_t keys = query + count + shape_.offset();
    for (int64_t key = begin, next; key < keys; key = next) {
      const int64_t base = key / kKeyBlock * kKeyBlock;  // a window's first block may begin inside of a prepared one
      next = base + kKeyBlock;
      const int64_t rows = round_up(smaller(next, keys) - key, Math::kRowStep);
      Math::multiply(scores_, kQueryBlock, Math::left(key_rows_ + key * width_, width_), query_columns_, kQueryBlock,
                     rows, lanes_, round_up(shape_.width, Math::kDepthStep), false);
      for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
        softmax(lane, rows, query + lane + shape_.offset() - key, key > begin);
      }
      const auto values = value_columns_ + base * width_ + (key - base);
      Math::multiply(out_columns_, kQueryBlock,
                     Math::columns(values, kKeyBlock, value_rows_ + key * width_, width_), probabilities_, kQueryBlock,
                     width_, lanes_, rows, key > begin);
    }
  }

  // Computes the probabilities of kLanes queries for one block of keys. The division by their sum is left to finish().
  void softmax(int64_t lane, int64_t rows, int64_t bound, bool add) {
    const int64_t first = clamped(bound - shape_.window + 1, 0, rows) / 2 * 2;
    const int64_t seen = round_up(clamped(bound + kLanes, 0, rows), 2);
    hide_past(lane, first, seen, bound - shape_.window);
    hide_future(lane, seen, bound);
    const float scale = shape_.scale * kLog2e;
    const Vec before = add ? load(shift_ + lane, All{}) : broadcast(least_shift());
    const Vec shift = max(before, largest(scores_ + lane + first * kQueryBlock, seen - first) * scale);
    const Vec total = add ? load(total_ + lane, All{}) * shrink(lane, before, shift) : Vec{};
    Vec totals[2] = {};
    const float* scores = scores_ + lane;
    for (int64_t row = 0; row < first; row += 2) {
      Math::store_right(probabilities_, kQueryBlock, row, lane, Vec{}, Vec{});
    }
    for (int64_t row = first; row < seen; row += 2) {
      const Vec even = Math::exp2(fma(load(scores + row * kQueryBlock, All{}), broadcast(scale), -shift));
      const Vec odd = Math::exp2(fma(load(scores + (row + 1) * kQueryBlock, All{}), broadcast(scale), -shift));
      totals[0] = totals[0] + even;
      totals[1] = totals[1] + odd;
      Math::store_right(probabilities_, kQueryBlock, row, lane, even, odd);
    }
    for (int64_t row = seen; row < rows; row += 2) {
      Math::store_right(probabilities_, kQueryBlock, row, lane, Vec{}, Vec{});
    }
    store(shift_ + lane, shift, All{});
    store(total_ + lane, total + (totals[0] + totals[1]), All{});
  }

  // Sets the score to -inf where a query does not see the key.
  void hide_future(int64_t lane, int64_t rows, int64_t bound) {
    for (int64_t row = clamped(bound + 1, 0, rows); row < rows; ++row) {
      float* scores = scores_ + row * kQueryBlock + lane;
      store(scores, where_seen(row, bound, load(scores, All{}), broadcast(-INFINITY)), All{});
    }
  }

  // Sets the score to -inf where a key, from `first` on, is before a query's window. Lane i does not see keys up to
  // past + i.
  void hide_past(int64_t lane, int64_t first, int64_t rows, int64_t past) {
    for (int64_t row = first; row < clamped(past + kLanes, 0, rows); ++row) {
      float* scores = scores_ + row * kQueryBlock + lane;
      store(scores, where_seen(row, past, broadcast(-INFINITY), load(scores, All{})), All{});
    }
  }
  // A block may have no key of a query's window: then exponentials are relative to a finite number, not to -inf.
  float least_shift() const { return shape_.window < shape_.keys ? -1e30f : -INFINITY; }

  static Vec largest(const float* scores, int64_t rows) {
    Vec maxima[2] = {broadcast(-INFINITY), broadcast(-INFINITY)};
    for (int64_t row = 0; row < rows; row += 2) {
      maxima[0] = max(load(scores + row * kQueryBlock, All{}), maxima[0]);
      maxima[1] = max(load(scores + (row + 1) * kQueryBlock, All{}), maxima[1]);
    }
    return max(maxima[0], maxima[1]);
  }

  // Converts the output sums from the shift `before` to `shift`. Returns the factor, for the sum of exponentials.
  Vec shrink(int64_t lane, Vec before, Vec shift) {
    const Vec factor = Math::exp2(before - shift);
    float* out = out_columns_ + lane;
    for (int64_t i = 0; i < width_; ++i) {
      store(out + i * kQueryBlock, load(out + i * kQueryBlock, All{}) * factor, All{});
    }
    return factor;
  }

  // Divides the output of a block by the sums of exponentials, and writes it and the log sum exp.
  void finish(const ForwardHead<T>& head, int64_t query, int64_t count) {
    for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
      const Vec share = 1.0f / load(total_ + lane, All{});
      float* columns = out_columns_ + lane;
      for (int64_t i = 0; i < width_; ++i) {
        store(columns + i * kQueryBlock, load(columns + i * kQueryBlock, All{}) * share, All{});
      }
    }
    for (int64_t i = 0; i < count; ++i) head.lse[query + i] = static_cast<float>(kLn2 * (shift_[i] + log2f(total_[i])));
    store_transposed<Math>(head.out, query, count, out_columns_, out_rows_, lanes_, shape_.width, width_, 1.0f);
  }

  const AttentionShape& shape_;
  const int64_t width_;  // padded
  [[maybe_unused]] typename Math::Unit unit_;
  ForwardRows<T> rows_;
  int64_t lanes_ = 0;  // queries of the block, padded
  Element *key_rows_, *value_rows_, *value_columns_, *query_rows_, *query_columns_, *probabilities_;
  // shift_ is the largest score so far, in base 2. total_ is the sum of 2^(score - shift).
  float *scores_, *out_columns_, *out_rows_, *shift_, *total_;
};

template <class Math, class T>
static inline int forward_by_blocks(const GptliteHeads* out, float* lse, const GptliteHeads* q, const GptliteHeads* k,
                                    const GptliteHeads* v, const AttentionShape& shape, void* context) {
  const int64_t chunks = (shape.queries + kQueryTask - 1) / kQueryTask;
  Scratch sizes;
  ForwardBlocks<Math, T>(shape, sizes);
  int status = 0;
  const auto body = [&](int64_t first, int64_t last) {
    Scratch scratch(sizes.bytes());
    if (scratch.empty()) {
      __atomic_store_n(&status, kOutOfMemory, __ATOMIC_RELAXED);
      return;
    }
    ForwardBlocks<Math, T> blocks(shape, scratch);
    for (int64_t task = first; task < last; ++task) {
      const int64_t index = task / chunks, b = index / shape.heads, h = index % shape.heads;
      // Order the chunks first, last, second, ...: a thread gets a range of tasks, and late chunks see more keys.
      const int64_t turn = task % chunks, query = kQueryTask * (turn % 2 ? chunks - 1 - turn / 2 : turn / 2);
      blocks.run({{out, b, h}, lse + index * shape.queries, {q, b, h}, {k, b, h}, {v, b, h}}, query,
                 smaller(query + kQueryTask, shape.queries));
    }
  };
  parallel(context, shape.batch * shape.heads * chunks, task_items(shape.queries * shape.keys), body);
  return status;
}

}  // namespace GPTLITE_ISA
}  // namespace gptlite
