// Faults of a kernel: illegal memory accesses, data races, misused barriers and undefined arithmetic.
#pragma once

namespace gptlite::emu {

// Records a fault at the return address `code` and ends the launch. Within a kernel it does not return. In the host
// code of a launcher it returns. Only the first fault is kept.
__attribute__((format(printf, 2, 3))) void fault(const void* code, const char* format, ...);

// Records a fault that two accesses cause together. The message also names the line of `other`, the earlier access.
void fault_between(const void* code, const void* other, const char* message);

bool faulted();
void forget_fault();

// Completes the message of the fault that ended a launch with the kernel, the thread and the source lines. Must not be
// called on a fiber, whose stack is too small.
void describe_fault(const void* kernel);

}  // namespace gptlite::emu
