// Access to contiguous elements of any alignment, and the assignment of blocks to the tensors of a list, for kernels
// over many tensors (AdamW, gradient norm) and over rows of any stride (cross entropy).
#pragma once

#include "dtype.cuh"

namespace gptlite {

// Division of `count` contiguous elements into `head` single elements before the first 16-byte boundary, `packs` packs
// of 16 bytes, and `tail` single elements.
struct Run {
  int64_t count;
  uint32_t packs;  // 32 bits are enough for 2^34 elements
  int head;  // single elements before the packs
  int tail;  // single elements after the packs

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

  // Returns the index of single element i, 0 <= i < head + tail.
  __device__ __forceinline__ int64_t single(int i) const { return i < head ? i : count - tail + (i - head); }
};

// Returns which of `count` tensors block `block` works on, by binary search. first[i] is the first block of tensor i.
// An empty tensor has no blocks, so the last i with first[i] <= block is the tensor.
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
