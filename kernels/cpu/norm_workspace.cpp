// Workspace size of the norm kernel, the same for CUDA, the CPU and the emulator.
#include "gptlite_kernels.h"

// One double (2 floats) for each chunk of 65536 elements of a tensor, and for at most one shorter chunk per tensor.
extern "C" __attribute__((visibility("default"))) int64_t gptlite_norm_workspace(int64_t elements, int64_t num_tensors) {
  return 2 * (elements / 65536 + num_tensors);
}
