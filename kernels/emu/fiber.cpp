#include "fiber.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace gptlite::emu {
namespace {

Fiber* entering;
ucontext_t preparing;

// A stack that overflows meets a page that can't be written.
size_t guard() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

Fiber::~Fiber() {
  if (stack_) munmap(stack_ - guard(), kStackBytes + guard());
}

// ucontext only to get on to the stack: its switches cost system calls, those of setjmp and longjmp don't.
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
