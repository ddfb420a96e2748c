// Functions that the instrumentation of g++ calls: before each memory access (-fsanitize=thread), and at undefined
// arithmetic or addresses (-fsanitize=alignment, bounds, ...). They replace the sanitizer runtimes, which are not
// linked.
#include <stddef.h>
#include <stdint.h>

#include "block.h"
#include "cuda.h"
#include "fault.h"
#include "memory.h"

using gptlite::emu::Access;
using gptlite::emu::fault;
using gptlite::emu::kStackBytes;
using gptlite::emu::running;

namespace {

// Checks an access unless it is to the thread's stack. Most accesses are, and they need no check.
inline void check(const void* address, size_t bytes, size_t alignment, Access access, const void* code) {
  if (running.kernel && reinterpret_cast<uintptr_t>(address) - running.stack >= kStackBytes)
    gptlite::emu::check_access(address, bytes, alignment, access, code);
}

}  // namespace

#define CODE __builtin_return_address(0)

unsigned gptlite::emu::atomic_max(unsigned* address, unsigned value) {
  check(address, sizeof value, sizeof value, Access::atomic, CODE);
  const unsigned old = *address;  // one thread runs at a time
  if (value > old) *address = value;
  return old;
}

#define ACCESS(bytes)                                                                                           \
  void __tsan_read##bytes(void* address) { check(address, bytes, bytes, Access::read, CODE); }                  \
  void __tsan_write##bytes(void* address) { check(address, bytes, bytes, Access::write, CODE); }                \
  void __tsan_unaligned_read##bytes(void* address) { check(address, bytes, 1, Access::read, CODE); }            \
  void __tsan_unaligned_write##bytes(void* address) { check(address, bytes, 1, Access::write, CODE); }          \
  void __tsan_volatile_read##bytes(void* address) { check(address, bytes, bytes, Access::read, CODE); }         \
  void __tsan_volatile_write##bytes(void* address) { check(address, bytes, bytes, Access::write, CODE); }

extern "C" {

ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_read_range(void* address, size_t bytes) {
  check(address, bytes, 1, Access::read, CODE);
}
void __tsan_write_range(void* address, size_t bytes) {
  check(address, bytes, 1, Access::write, CODE);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
// Read of the guard variable of a static in a launcher function.
uint8_t __tsan_atomic8_load(const volatile uint8_t* address, int) { return __atomic_load_n(address, __ATOMIC_SEQ_CST); }

// Linked with --wrap, because g++ does not instrument calls of memcpy and memset.
void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int value, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  if (bytes) check(from, bytes, 1, Access::read, CODE);
  if (bytes) check(to, bytes, 1, Access::write, CODE);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  if (bytes) check(to, bytes, 1, Access::write, CODE);
  return __real_memset(to, value, bytes);
}

void __ubsan_handle_type_mismatch_v1(void*, void* address) {
  const unsigned end = reinterpret_cast<uintptr_t>(address) & 0xff;
  fault(CODE, "misaligned access, at an address that ends in %#x", end);
}
void __ubsan_handle_out_of_bounds(void*, void* index) {
  fault(CODE, "index %lld is out of an array's bounds", static_cast<long long>(reinterpret_cast<intptr_t>(index)));
}
void __ubsan_handle_add_overflow(void*, void*, void*) { fault(CODE, "overflow of a signed sum"); }
void __ubsan_handle_sub_overflow(void*, void*, void*) { fault(CODE, "overflow of a signed difference"); }
void __ubsan_handle_mul_overflow(void*, void*, void*) { fault(CODE, "overflow of a signed product"); }
void __ubsan_handle_negate_overflow(void*, void*) { fault(CODE, "overflow of a negated number"); }
void __ubsan_handle_divrem_overflow(void*, void*, void*) { fault(CODE, "integer division by zero, or its overflow"); }
void __ubsan_handle_shift_out_of_bounds(void*, void*, void*) { fault(CODE, "shift by less than 0 or too many bits"); }

}  // extern "C"
