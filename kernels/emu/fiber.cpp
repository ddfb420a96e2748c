// Stacks of fibers, and the first switch to a fiber.
#include "fiber.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace gptlite::emu {
namespace {

Fiber* entering;
ucontext_t preparing;

// Size of the inaccessible page below each stack, so that a stack overflow crashes instead of overwriting memory.
size_t guard() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

Fiber::~Fiber() {
  if (stack_) munmap(stack_ - guard(), kStackBytes + guard());
}

// Uses ucontext only to start on the new stack. Later switches use setjmp and longjmp, which need no system calls.
void Fiber::prepare(void (*body)()) {
  if (!stack_) {
    void* memory = mmap(nullptr, kStackBytes + guard(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard(), PROT_NONE) != 0) abort();
    stack_ = static_cast<char*>(memory) + guard();
  }
  body_ = body;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack_;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  entering = this;
  swapcontext(&preparing, &context);
}

void Fiber::enter() {
  Fiber* self = entering;
  if (_setjmp(self->registers_) == 0) setcontext(&preparing);
  self->body_();
}

}  // namespace gptlite::emu
