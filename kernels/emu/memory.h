// Checks of the memory accesses of a kernel: bounds, alignment, write permission, uninitialized reads and data races.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace gptlite::emu {

enum class Access { read, write, atomic };  // an atomic access races with nothing

// Access that a test grants to registered global memory. Shared memory is always `fresh`.
enum class Mode {
  read_only = 0,
  writable = 1,
  fresh = 2,  // writable, and uninitialized until written
};

// Checks an access of the running thread: records a fault if it is illegal, else records the access. The address must
// be a multiple of `alignment`.
void check_access(const void* address, size_t bytes, size_t alignment, Access access, const void* code);

// Registers global memory until forget_memory. Returns false if it overlaps with memory that is already registered.
bool lend_memory(void* address, size_t bytes, Mode mode);
void forget_memory();

// Set up the dynamic shared memory and the kernel arguments of a launch, and fill the shared memory with NaN at the
// start of each block.
void begin_launch_memory(size_t shared, const void* arguments, size_t argument_bytes);
void begin_block_memory();

}  // namespace gptlite::emu
