// Fibers: what takes turns on one CPU thread, each on a stack of its own.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp refuses to go to another stack
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

  // The next switch here calls body, which never returns. What ran here before is dropped where it stands.
  void prepare(void (*body)());
  bool prepared() const { return body_ != nullptr; }
  void drop() { body_ = nullptr; }

  // Leaves `from`, which goes on where it is left at the next switch to it.
  void resume(Fiber& from) {
    if (_setjmp(from.registers_) == 0) _longjmp(registers_, 1);
  }

  uintptr_t stack() const { return reinterpret_cast<uintptr_t>(stack_); }

 private:
  static void enter();

  jmp_buf registers_;
  void (*body_)() = nullptr;
  char* stack_ = nullptr;  // none: the stack of the thread that launches
};

}  // namespace gptlite::emu
