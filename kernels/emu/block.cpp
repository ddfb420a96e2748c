// Scheduling of the threads of a block, and the operations that synchronize them: __syncthreads, __syncwarp and
// shuffles. A block in which these can never complete is a fault.
#include "block.h"

#include <stdio.h>

#include "fault.h"
#include "memory.h"

namespace gptlite::emu {

Running running;

namespace {

enum class State : uint8_t { ready, barrier, warp, exited };

// A warp-wide operation that a thread takes part in: a shuffle, or __syncwarp, which is a shuffle without a value.
struct WarpCall {
  bool moves_value;
  Shuffle kind;
  unsigned mask;
  uint64_t bits;  // value of the lane, then the result
  int operand;
  int width;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  State state;
  int line;          // source line at which the thread waits
  const void* code;  // return address of the call at which the thread waits
  WarpCall call;
};

Thread threads[kMaxThreads];
Fiber host;
const Launch* running_launch;
uint3 block;
int count;       // threads of the block
int at_barrier;  // number of threads that wait at __syncthreads
int exited;
unsigned waiting[kWarp];  // per warp, the lanes that wait for other lanes
int ready[kMaxThreads];   // threads that can continue, unordered
int num_ready;
uint64_t schedule = 1;

Thread& current() { return threads[running.thread]; }

void make_ready(int thread) {
  threads[thread].state = State::ready;
  ready[num_ready++] = thread;
}

const char* whereabouts(const Thread& thread) {
  static char text[64];
  if (thread.state == State::exited) return "has exited";
  const char* where = thread.call.moves_value ? "a shuffle" : "__syncwarp";
  if (thread.state == State::barrier) where = "__syncthreads";
  snprintf(text, sizeof text, "waits at %s in line %d", where, thread.line);
  return text;
}

// Reports a fault if a lane in the mask of thread `waiter` is not at the same warp operation. Returns whether there is
// one.
bool missing_lane(int waiter) {
  const Thread& thread = threads[waiter];
  const char* name = thread.call.moves_value ? "shuffle" : "__syncwarp";
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(thread.call.mask >> lane & 1)) continue;
    const int other = waiter / kWarp * kWarp + lane;
    if (other >= count) {
      fault(thread.code, "%s of thread %d: its mask %08x names lane %d of a block of %d threads", name, waiter,
            thread.call.mask, lane, count);
      return true;
    }
    const Thread& named = threads[other];
    if (named.state == State::warp && named.line == thread.line && named.call.mask == thread.call.mask) continue;
    fault(thread.code, "%s of thread %d: its mask %08x names lane %d, which %s", name, waiter, thread.call.mask, lane,
          whereabouts(named));
    return true;
  }
  return false;
}

// Reports the fault of a deadlock: all threads wait or have exited, and no wait can end.
void fault_of_stuck_block() {
  for (int i = 0; i < count; ++i)
    if (threads[i].state == State::warp && missing_lane(i)) return;
  for (int i = 0; i < count; ++i)
    for (int other = 0; other < count; ++other)
      if (threads[i].state == State::barrier && threads[other].state != State::barrier)
        fault(threads[i].code, "__syncthreads is reached by thread %d, but thread %d %s", i, other,
              whereabouts(threads[other]));
}

// Called by a thread that must wait or has exited: runs a random ready thread. Returns when this thread is ready and
// chosen again.
void next_thread() {
  Thread& self = current();
  if (num_ready == 0) {
    if (exited < count) fault_of_stuck_block();
    host.resume(self.fiber);
    return;
  }
  const int pick = static_cast<int>(random_number() % static_cast<uint64_t>(num_ready));
  const int next = ready[pick];
  ready[pick] = ready[--num_ready];
  running.thread = next;
  running.stack = threads[next].fiber.stack();
  if (&threads[next] != &self) threads[next].fiber.resume(self.fiber);
}

// Body of a fiber: runs one thread of each block, because fibers are reused from block to block.
void run_threads() {
  for (;;) {
    running_launch->run(running_launch->arguments);
    current().state = State::exited;
    ++exited;
    next_thread();
  }
}

// Returns the value that a shuffle gives to `thread`.
uint64_t value_of_lane(int thread) {
  const WarpCall& call = threads[thread].call;
  const int lane = thread % kWarp, first = lane & ~(call.width - 1), last = first + call.width - 1;
  int source = lane;
  if (call.kind == Shuffle::index) source = first + (call.operand & (call.width - 1));
  if (call.kind == Shuffle::up) source = lane - call.operand;
  if (call.kind == Shuffle::down) source = lane + call.operand;
  if (call.kind == Shuffle::exclusive_or) source = lane ^ call.operand;
  const bool out = source > last || source < 0 || (call.kind == Shuffle::up && source < first);
  if (out) source = lane;  // CUDA returns the lane's own value
  if (!(call.mask >> source & 1))
    fault(threads[thread].code, "shuffle of thread %d reads lane %d, which its mask %08x does not name", thread, source,
          call.mask);
  return threads[thread - lane + source].call.bits;
}

// Completes a warp operation once all lanes of the mask have reached it.
void complete(int warp, unsigned mask) {
  uint64_t values[kWarp];
  const int first = warp * kWarp;
  for (int lane = 0; lane < kWarp; ++lane)
    if (mask >> lane & 1) values[lane] = threads[first + lane].call.moves_value ? value_of_lane(first + lane) : 0;
  // Only a __syncwarp of the whole warp starts a new epoch. Shuffles do not order memory accesses, and the emulator
  // does not count a __syncwarp of a part of the warp.
  bool whole = !current().call.moves_value;
  for (int lane = 0; lane < kWarp && first + lane < count; ++lane) {
    if (mask >> lane & 1) {
      threads[first + lane].call.bits = values[lane];
      if (first + lane != running.thread) make_ready(first + lane);
    } else if (threads[first + lane].state != State::exited) {
      whole = false;
    }
  }
  if (whole) running.warps[warp] = ++running.last;
  waiting[warp] &= ~mask;
  current().state = State::ready;
}

// Enters a warp operation. Waits until the other lanes of the mask enter it too.
void call_warp(const WarpCall& call, int line, const void* code) {
  Thread& self = current();
  const int warp = running.thread / kWarp, lane = running.thread % kWarp;
  if (!(call.mask >> lane & 1))
    fault(code, "%s of thread %d: its mask %08x leaves out its own lane %d",
          call.moves_value ? "shuffle" : "__syncwarp", running.thread, call.mask, lane);
  self.state = State::warp;
  self.call = call;
  self.line = line;
  self.code = code;
  waiting[warp] |= 1u << lane;
  bool all = (waiting[warp] & call.mask) == call.mask;
  for (int other = 0; all && other < kWarp; ++other) {
    const Thread& thread = threads[warp * kWarp + other];
    if (call.mask >> other & 1) all = thread.line == line && thread.call.mask == call.mask;
  }
  if (all)
    complete(warp, call.mask);
  else
    next_thread();
}

void start_epoch() {
  running.barrier = ++running.last;
  for (Epoch& warp : running.warps) warp = running.barrier;
}

}  // namespace

void seed_schedule(uint64_t seed) { schedule = seed * 2 + 1; }

// The generator xorshift64* (Vigna 2016), upper 32 bits.
uint64_t random_number() {
  schedule ^= schedule >> 12;
  schedule ^= schedule << 25;
  schedule ^= schedule >> 27;
  return (schedule * 0x2545F4914F6CDD1Dull) >> 32;
}

void run_block(const Launch& call, uint3 index) {
  running_launch = &call;
  block = index;
  count = static_cast<int>(call.block.x * call.block.y * call.block.z);
  at_barrier = exited = num_ready = 0;
  for (unsigned& lanes : waiting) lanes = 0;
  for (int i = 0; i < count; ++i) {
    const unsigned at = static_cast<unsigned>(i);
    threads[i].index = {at % call.block.x, at / call.block.x % call.block.y, at / call.block.x / call.block.y};
    if (!threads[i].fiber.prepared()) threads[i].fiber.prepare(run_threads);
    make_ready(i);
  }
  start_epoch();
  running.block = running.barrier;
  running.accesses = 0;
  running.thread = ready[--num_ready];
  running.stack = current().fiber.stack();
  running.kernel = true;
  current().fiber.resume(host);
  running.kernel = false;
}

void leave_block() {
  for (int i = 0; i < count; ++i) threads[i].fiber.drop();
  host.resume(current().fiber);
  __builtin_unreachable();
}

uint3 thread_index() { return current().index; }
uint3 block_index() { return block; }
uint3 block_size() { return {running_launch->block.x, running_launch->block.y, running_launch->block.z}; }
uint3 grid_size() { return {running_launch->grid.x, running_launch->grid.y, running_launch->grid.z}; }

void sync_threads(int line) {
  Thread& self = current();
  self.state = State::barrier;
  self.line = line;
  self.code = __builtin_return_address(0);
  if (++at_barrier < count) return next_thread();
  at_barrier = 0;
  start_epoch();
  for (int i = 0; i < count; ++i) {
    if (threads[i].line != line)
      fault(self.code, "__syncthreads is reached by thread %d, but thread %d %s", running.thread, i,
            whereabouts(threads[i]));
    if (i != running.thread) make_ready(i);
  }
  self.state = State::ready;
}

void sync_warp(unsigned mask, int line) {
  call_warp({false, Shuffle::index, mask, 0, 0, kWarp}, line, __builtin_return_address(0));
}

uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t bits, int operand, int width, int line) {
  const void* code = __builtin_return_address(0);
  if (width < 1 || width > kWarp || (width & (width - 1)) != 0)
    fault(code, "shuffle of thread %d: width %d is not a power of 2 up to 32", running.thread, width);
  call_warp({true, kind, mask, bits, operand, width}, line, code);
  return current().call.bits;
}

}  // namespace gptlite::emu
