// The workspace of gptlite_norm, the same for CUDA, CPU and emulator.
#include "gptlite_kernels.h"

// A double for each chunk of 65536 elements or the rest of a tensor, of which a tensor has at most one.
extern "C" __attribute__((visibility("default"))) int64_t gptlite_norm_workspace(int64_t elements, int64_t num_tensors) {
  return 2 * (elements / 65536 + num_tensors);
}
