// The workspace of the kernels with sums over rows, the same for CUDA, CPU and emulator.
#include "gptlite_kernels.h"

// Up to three sums of each column (weight, bias of the norm, bias before it), each in up to 256 parts of the rows.
extern "C" __attribute__((visibility("default"))) int64_t gptlite_rows_workspace(int64_t rows, int64_t width) {
  return 3 * (rows < 256 ? rows : 256) * width;
}
