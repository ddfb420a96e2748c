// What a launch did wrong.
#pragma once

namespace gptlite::emu {

// Says what is wrong at the call that returns to `code`, and ends the launch: within a kernel it does not return.
// Outside of one (a launcher's own arithmetic) it does. Only the first fault is kept.
__attribute__((format(printf, 2, 3))) void fault(const void* code, const char* format, ...);

// The same of two accesses; the line of `other`, the earlier one, is told too.
void fault_between(const void* code, const void* other, const char* message);

bool faulted();
void forget_fault();

// Adds the kernel, the thread and the lines to a fault that ended a launch; not on a fiber's stack, which is small.
void describe_fault(const void* kernel);

}  // namespace gptlite::emu
