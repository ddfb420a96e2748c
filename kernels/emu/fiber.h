// Fibers (coroutines with separate stacks), which take turns on one CPU thread.
#pragma once

#undef _FORTIFY_SOURCE  // the fortified longjmp refuses to switch stacks
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

namespace gptlite::emu {

constexpr size_t kStackBytes = 64 << 10;

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // Makes the next switch to this fiber call body, which must never return. Whatever ran on the fiber before is
  // abandoned.
  void prepare(void (*body)());
  bool prepared() const { return body_ != nullptr; }
  void drop() { body_ = nullptr; }

  // Switches from the running fiber `from` to this one. A later switch to `from` continues after this call.
  void resume(Fiber& from) {
    if (_setjmp(from.registers_) == 0) _longjmp(registers_, 1);
  }

  uintptr_t stack() const { return reinterpret_cast<uintptr_t>(stack_); }

 private:
  static void enter();

  jmp_buf registers_;
  void (*body_)() = nullptr;
  char* stack_ = nullptr;  // NULL for the launching thread, which uses its normal stack
};

}  // namespace gptlite::emu
