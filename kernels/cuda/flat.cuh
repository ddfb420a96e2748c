// Runs of elements that start anywhere, and lists of tensors given to a kernel by value.
#pragma once

#include "dtype.cuh"

namespace gptlite {

// Elements at `data`: single ones until a pack is aligned, packs, single ones again.
struct Run {
  int64_t count;
  uint32_t packs;  // of up to 2^34 elements
  int head;  // single elements before the packs
  int tail;  // and after

  template <typename T>
  __device__ __forceinline__ static Run of(const T* data, int64_t count) {
    const int beyond = static_cast<int>(reinterpret_cast<uintptr_t>(data) % kPackBytes);
    const int64_t before = beyond == 0 ? 0 : (kPackBytes - beyond) / static_cast<int>(sizeof(T));
    Run run;
    run.count = count;
    run.head = static_cast<int>(before < count ? before : count);
    run.packs = static_cast<uint32_t>((count - run.head) / kFullPack<T>);
    run.tail = static_cast<int>((count - run.head) % kFullPack<T>);
    return run;
  }

  // Element of single number i < head + tail.
  __device__ __forceinline__ int64_t single(int i) const { return i < head ? i : count - tail + (i - head); }
};

// Of `count` tensors, the one that block `block` works on: first[i] is the number of tensor i's first block, and a
// tensor of no elements has none.
__device__ __forceinline__ int find_tensor(const int* first, int count, int block) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first[middle] <= block)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace gptlite
