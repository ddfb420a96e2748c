// Workspace size of the kernels with column sums, the same for CUDA, the CPU and the emulator.
#include "gptlite_kernels.h"

// Floats for up to three sums per column (weight and bias of the norm, and the bias before it), each in up to 256 parts
// of the rows.
extern "C" __attribute__((visibility("default"))) int64_t gptlite_rows_workspace(int64_t rows, int64_t width) {
  return 3 * (rows < 256 ? rows : 256) * width;
}
