// The emulated device: its limits, launches, the functions of the CUDA runtime, and the C functions that tests call.
#include <map>
#include <mutex>
#include <numeric>

#include "block.h"
#include "cuda.h"
#include "fault.h"
#include "memory.h"

namespace gptlite::emu {
namespace {

constexpr size_t kPlainShared = 48 << 10;  // bytes available without cudaFuncSetAttribute
constexpr uint64_t kMaxGridX = 2147483647, kMaxGrid = 65535, kMaxBlockZ = 64;

int processors = 3;                       // few, so that blocks loop several times
size_t most_shared = 227 << 10;           // as on sm_90; sm_80 has 163 KB
std::map<const void*, size_t> leave;      // limit of dynamic shared memory set for a kernel
cudaError_t last_error = cudaSuccess;
std::mutex one_launch;

bool valid(const Launch& launch) {
  const dim3 grid = launch.grid, block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  return threads >= 1 && block.x <= kMaxThreads && block.y <= kMaxThreads && threads <= kMaxThreads &&
         block.z <= kMaxBlockZ && grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= kMaxGridX &&
         grid.y <= kMaxGrid && grid.z <= kMaxGrid;
}

size_t shared_limit(const void* kernel) {
  const auto found = leave.find(kernel);
  return found == leave.end() ? kPlainShared : found->second;
}

// Runs every block once, in the pseudo-random order (i * step + start) mod count. step is coprime to count, so no block
// is run twice.
void run_blocks(const Launch& launch) {
  const uint64_t count = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  uint64_t step = random_number() % count + 1;
  while (std::gcd(step, count) != 1) ++step;
  const uint64_t start = random_number() % count;
  for (uint64_t i = 0; i < count && !faulted(); ++i) {
    const uint64_t at = static_cast<uint64_t>((static_cast<unsigned __int128>(i) * step + start) % count);
    begin_block_memory();
    const uint64_t row = at / launch.grid.x;
    run_block(launch, {static_cast<unsigned>(at % launch.grid.x), static_cast<unsigned>(row % launch.grid.y),
                       static_cast<unsigned>(row / launch.grid.y)});
  }
}

}  // namespace

int run(const Launch& launch) {
  const std::lock_guard<std::mutex> lock(one_launch);
  if (faulted()) return cudaErrorLaunchFailure;
  if (!valid(launch)) return cudaErrorInvalidConfiguration;
  if (launch.shared > shared_limit(launch.kernel)) return cudaErrorInvalidValue;
  begin_launch_memory(launch.shared, launch.arguments, launch.argument_bytes);
  running.launch = ++running.last;
  run_blocks(launch);
  if (!faulted()) return cudaSuccess;
  describe_fault(launch.kernel);
  return cudaErrorLaunchFailure;
}

}  // namespace gptlite::emu

using namespace gptlite::emu;

cudaError_t cudaGetLastError() {
  const cudaError_t error = faulted() ? static_cast<cudaError_t>(cudaErrorLaunchFailure) : last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || static_cast<size_t>(value) > most_shared)
    return last_error = cudaErrorInvalidValue;
  leave[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? processors : static_cast<int>(most_shared);
  return cudaSuccess;
}

extern "C" {

// Registers global memory with a Mode: read-only (0), writable (1), or to be written before it is read (2). Returns 1,
// or 0 if it overlaps with registered memory.
int gptlite_emu_register(void* address, int64_t bytes, int mode) {
  return lend_memory(address, static_cast<size_t>(bytes), static_cast<Mode>(mode));
}

// Forgets the registered memory and the error.
void gptlite_emu_reset() {
  forget_memory();
  forget_fault();
}

void gptlite_emu_seed(uint64_t seed) { seed_schedule(seed); }

void gptlite_emu_device(int count, int64_t shared_bytes) {
  processors = count;
  most_shared = static_cast<size_t>(shared_bytes);
  leave.clear();
}

}  // extern "C"
