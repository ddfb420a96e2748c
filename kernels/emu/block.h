// Execution of one thread block in the emulator. Each thread is a fiber, and a seeded random number generator decides
// which fiber runs next.
#pragma once

#include <stdint.h>

#include "cuda.h"
#include "fiber.h"

namespace gptlite::emu {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;

// Number of an interval between two barriers. It increases over all launches, so a later interval has a higher number.
using Epoch = uint64_t;

// The running thread, its stack, and the epochs that began with the launch, the block and the last barriers. memory.cpp
// reads this state at every memory access.
struct Running {
  bool kernel = false;  // true while a fiber runs, false in the launcher
  int thread = 0;
  uintptr_t stack = 0;   // address of the stack of its fiber
  Epoch launch = 0;      // first epoch of the launch
  Epoch block = 0;       // first epoch of the block
  Epoch barrier = 0;     // epoch since the last __syncthreads
  Epoch warps[kWarp]{};  // epoch of each warp, since its last __syncwarp or __syncthreads
  Epoch last = 0;
  uint64_t accesses = 0;  // number of accesses by the block so far
};
extern Running running;

inline Epoch epoch() { return running.warps[running.thread / kWarp]; }

void seed_schedule(uint64_t seed);
uint64_t random_number();

// Runs a block until all its threads exit, or until a fault.
void run_block(const Launch& launch, uint3 index);

// Called on a fiber: ends the block. Drops all its fibers and returns to the caller of run_block.
[[noreturn]] void leave_block();

}  // namespace gptlite::emu
