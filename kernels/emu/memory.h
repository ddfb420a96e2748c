// What a kernel may read and write, and when.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace gptlite::emu {

enum class Access { read, write };

// Of global memory that a test lends; shared memory is always `fresh`.
enum class Mode {
  read_only = 0,
  writable = 1,
  fresh = 2,  // writable, and of no contents until written
};

// Faults where the running thread must not make this access, else records it. `alignment`: what the address must be a
// multiple of.
void check_access(const void* address, size_t bytes, size_t alignment, Access access, const void* code);

// Lends global memory until forget_memory. False where it overlaps with other memory that is lent.
bool lend_memory(void* address, size_t bytes, Mode mode);
void forget_memory();

// Dynamic shared memory of the next blocks, and what arguments stand at; shared memory starts each block as NaN.
void begin_launch_memory(size_t shared, const void* arguments, size_t argument_bytes);
void begin_block_memory();

}  // namespace gptlite::emu
