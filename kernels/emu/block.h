// One thread block: its threads as fibers, in an order drawn from a seed.
#pragma once

#include <stdint.h>

#include "cuda.h"
#include "fiber.h"

namespace gptlite::emu {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;

// Numbers the stretches of work between barriers, of all launches: of two of them the later has the higher number.
using Epoch = uint64_t;

// Who runs, and since when; what memory.cpp asks at every access.
struct Running {
  bool kernel = false;  // a fiber runs, not the launcher
  int thread = 0;
  uintptr_t stack = 0;   // of its fiber
  Epoch launch = 0;      // the launch's first
  Epoch block = 0;       // the block's first
  Epoch barrier = 0;     // since the last __syncthreads
  Epoch warps[kWarp]{};  // of each warp, since the last __syncwarp or __syncthreads
  Epoch last = 0;
  uint64_t accesses = 0;  // by the block
};
extern Running running;

inline Epoch epoch() { return running.warps[running.thread / kWarp]; }

void seed_schedule(uint64_t seed);
uint64_t random_number();

// Runs a block to its end, or to its fault.
void run_block(const Launch& launch, uint3 index);

// From a fiber: leaves it and all others for good.
[[noreturn]] void leave_block();

}  // namespace gptlite::emu
