// Declarations shared by the attention kernels: the shape of the problem, access to a head, and scratch memory.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#include "gptlite_kernels.h"
#include "simd.h"

namespace gptlite {
namespace GPTLITE_ISA {

constexpr int kOutOfMemory = 2;  // cudaErrorMemoryAllocation

struct AttentionShape {
  int64_t batch, heads, queries, keys, width;
  float scale;
  int64_t window;  // number of keys, up to its own, that a query sees

  // Query i sees the keys first_key(i) to i + offset().
  int64_t offset() const { return keys - queries; }
  int64_t first_key(int64_t query) const { return query + offset() < window ? 0 : query + offset() - window + 1; }
};

GPTLITE_INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
GPTLITE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
GPTLITE_INLINE int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Rows of one head of a tensor: position p starts at data + p * stride.
template <class T>
struct Head {
  T* data;
  int64_t stride;

  Head(const GptliteHeads* tensor, int64_t batch, int64_t head)
      : data(static_cast<T*>(tensor->data) + batch * tensor->batch + head * tensor->head), stride(tensor->position) {}

  T* row(int64_t position) const { return data + position * stride; }
};

template <class T>
struct ForwardHead {
  Head<T> out;
  float* lse;
  Head<const T> q, k, v;
};

template <class T>
struct BackwardHead {
  Head<T> dq, dk, dv;
  Head<const T> dout, out;
  const float* lse;
  Head<const T> q, k, v;
};

// One allocation that is divided into aligned pieces. A default-constructed Scratch has no memory and only adds up the
// sizes: the same constructor code runs with it first, to find the size of the allocation.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t bytes) : memory_(static_cast<char*>(aligned_alloc(kAlignment, bytes + kAlignment))) {}
  ~Scratch() { free(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  void take(T*& piece, int64_t count) {
    piece = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
  }
  bool empty() const { return memory_ == nullptr; }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 64;
  char* memory_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace GPTLITE_ISA
}  // namespace gptlite
