// Shadow memory of the emulated device: for each byte that a kernel may write, the last write and read. An access races
// if no barrier orders it after a recorded access of another thread, and one of the two is a write.
#include "memory.h"

#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <vector>

#include "block.h"
#include "fault.h"

namespace gptlite::emu {
namespace {

constexpr uint64_t kEndless = uint64_t{1} << 26;  // accesses after which a block counts as endless

// The last write and read of a byte. A record is epoch * 2^16 + who, with the address in the code beside it. `who` is a
// thread, or for several readers since the last barrier one of the numbers below.
struct Cell {
  uint64_t write;
  uint64_t read;
  const void* write_code;
  const void* read_code;
};

constexpr int kSeveralLanes = 1024;  // + the number of the warp
constexpr int kSeveralWarps = 2048;
constexpr int kSeveralBlocks = 2049;

struct Region {
  uintptr_t first;
  size_t bytes;
  bool writable;
  bool shared;
  Epoch born;   // bytes not written since then are uninitialized
  Cell* cells;  // NULL for read-only memory

  bool holds(uintptr_t address) const { return address - first < bytes; }
  uintptr_t end() const { return first + bytes; }
};

std::map<uintptr_t, Region> lent;  // registered memory, by its first address
std::vector<Region> library;  // segments of the library: constants, and statics as shared memory
Region dynamic{};
Region arguments{};

uint64_t record(int who) { return epoch() << 16 | static_cast<uint64_t>(who); }
Epoch when(uint64_t record) { return record >> 16; }
int who(uint64_t record) { return static_cast<int>(record & 0xffff); }

// Returns whether no barrier orders the recorded access and an access of the running thread now. Accesses before epoch
// `since` are ignored.
bool unordered(uint64_t record, Epoch since) {
  if (when(record) < since) return false;
  const int other = who(record);
  if (other == kSeveralBlocks || when(record) < running.block) return true;
  if (when(record) < running.barrier) return false;
  if (other == running.thread) return false;
  if (other == kSeveralWarps) return true;
  const int warp = other >= kSeveralLanes ? other - kSeveralLanes : other / kWarp;
  return warp != running.thread / kWarp || when(record) >= epoch();
}

// Returns the record of readers after a read by the running thread. Earlier readers are kept if a later write could
// race with them.
uint64_t readers(uint64_t record_before, Epoch since) {
  const uint64_t mine = record(running.thread);
  const int other = who(record_before), warp = running.thread / kWarp;
  if (when(record_before) < since) return mine;
  if (other == kSeveralBlocks || when(record_before) < running.block) return record(kSeveralBlocks);
  if (when(record_before) < running.barrier) return mine;
  if (other == kSeveralWarps) return record(kSeveralWarps);
  if ((other >= kSeveralLanes ? other - kSeveralLanes : other / kWarp) != warp) return record(kSeveralWarps);
  if (when(record_before) < epoch() || other == running.thread) return mine;
  return record(kSeveralLanes + warp);
}

const char* name(Access access) {
  return access == Access::write ? "write" : access == Access::read ? "read" : "atomic access";
}
const char* space(const Region& region) { return region.shared ? "shared" : "global"; }

void fault_of_race(const Region& region, uintptr_t address, Access access, uint64_t other, Access other_access,
                   const void* other_code, const void* code) {
  char whom[40], text[200];
  if (when(other) < running.block || who(other) == kSeveralBlocks)
    snprintf(whom, sizeof whom, "another block");
  else if (who(other) >= kSeveralLanes)
    snprintf(whom, sizeof whom, "several threads");
  else
    snprintf(whom, sizeof whom, "thread %d", who(other));
  snprintf(text, sizeof text, "race: %s of %s memory, byte %zu, and no barrier since the %s by %s", name(access),
           space(region), static_cast<size_t>(address - region.first), name(other_access), whom);
  fault_between(code, other_code, text);
}

void check_byte(const Region& region, uintptr_t address, Access access, const void* code) {
  if (access == Access::atomic) return;
  Cell& cell = region.cells[address - region.first];
  const Epoch since = region.shared ? running.block : running.launch;
  if (unordered(cell.write, since))
    return fault_of_race(region, address, access, cell.write, Access::write, cell.write_code, code);
  if (access == Access::read) {
    if (when(cell.write) < (region.shared ? running.block : region.born))
      return fault(code, "read of %s memory that nothing was written to, byte %zu", space(region),
                   static_cast<size_t>(address - region.first));
    cell.read = readers(cell.read, since);
    cell.read_code = code;
    return;
  }
  if (unordered(cell.read, since))
    return fault_of_race(region, address, access, cell.read, Access::read, cell.read_code, code);
  cell.write = record(running.thread);
  cell.write_code = code;
}

const Region* find(uintptr_t address) {
  if (dynamic.holds(address)) return &dynamic;
  const auto after = lent.upper_bound(address);
  if (after != lent.begin() && std::prev(after)->second.holds(address)) return &std::prev(after)->second;
  if (arguments.holds(address)) return &arguments;
  for (const Region& region : library)
    if (region.holds(address)) return &region;
  return nullptr;
}

void fault_outside(uintptr_t address, size_t bytes, Access access, const void* code) {
  const Region* nearest = nullptr;
  uintptr_t distance = 1 << 20;  // beyond that distance, the pointer is unrelated to any region
  const auto consider = [&](const Region& region) {
    const uintptr_t before = region.first - address, past = address - region.end();
    const uintptr_t off = region.holds(address) ? 0 : address < region.first ? before : past;
    if (off >= distance) return;
    distance = off;
    nearest = &region;
  };
  for (const auto& [first, region] : lent) consider(region);
  if (dynamic.bytes) consider(dynamic);
  if (!nearest) return fault(code, "out of bounds: %s of %zu bytes in no memory of the device", name(access), bytes);
  fault(code, "out of bounds: %s of %zu bytes at byte %td of %zu bytes of %s memory", name(access), bytes,
        static_cast<ptrdiff_t>(address - nearest->first), nearest->bytes, space(*nearest));
}

// Callback of dl_iterate_phdr: adds the loaded segments of this library as regions. Returns nonzero to stop at the
// library.
int add_segments(dl_phdr_info* info, size_t, void*) {
  const uintptr_t here = reinterpret_cast<uintptr_t>(&add_segments);
  bool ours = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    ours |= header.p_type == PT_LOAD && here - (info->dlpi_addr + header.p_vaddr) < header.p_memsz;
  }
  for (int i = 0; ours && i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    Region region{info->dlpi_addr + header.p_vaddr, header.p_memsz, (header.p_flags & PF_W) != 0, false, 0, nullptr};
    region.shared = region.writable;
    if (region.writable) region.cells = static_cast<Cell*>(calloc(region.bytes, sizeof(Cell)));
    library.push_back(region);
  }
  return ours;
}

}  // namespace

void check_access(const void* pointer, size_t bytes, size_t alignment, Access access, const void* code) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (++running.accesses > kEndless) fault(code, "the block does not come to an end");
  if (address % alignment != 0)
    fault(code, "misaligned %s of %zu bytes at an address that is no multiple of %zu", name(access), bytes, alignment);
  const Region* region = find(address);
  if (!region || bytes > region->end() - address) return fault_outside(address, bytes, access, code);
  if (access != Access::read && !region->writable)
    return fault(code, "write of %zu bytes at byte %zu of %zu bytes of memory that is only to be read", bytes,
                 static_cast<size_t>(address - region->first), region->bytes);
  if (!region->cells) return;
  for (size_t i = 0; i < bytes; ++i) check_byte(*region, address + i, access, code);
}

bool lend_memory(void* pointer, size_t bytes, Mode mode) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(pointer);
  if (bytes == 0) return true;
  const auto next = lent.lower_bound(first);
  if (next != lent.end() && next->first < first + bytes) return false;
  if (next != lent.begin() && std::prev(next)->second.end() > first) return false;
  Region region{first, bytes, mode != Mode::read_only, false, 0, nullptr};
  if (mode == Mode::fresh) region.born = ++running.last;
  if (region.writable) region.cells = static_cast<Cell*>(calloc(bytes, sizeof(Cell)));
  lent.emplace(first, region);
  return true;
}

void forget_memory() {
  for (const auto& [first, region] : lent) free(region.cells);
  lent.clear();
}

void begin_launch_memory(size_t shared, const void* pointer, size_t argument_bytes) {
  if (library.empty()) dl_iterate_phdr(add_segments, nullptr);
  arguments = {reinterpret_cast<uintptr_t>(pointer), argument_bytes, false, false, 0, nullptr};
  if (dynamic.bytes == shared) return;
  free(reinterpret_cast<void*>(dynamic.first));
  free(dynamic.cells);
  dynamic = {0, shared, true, true, 0, nullptr};
  if (shared == 0) return;
  dynamic.first = reinterpret_cast<uintptr_t>(aligned_alloc(128, (shared + 127) / 128 * 128));
  dynamic.cells = static_cast<Cell*>(calloc(shared, sizeof(Cell)));
}

void begin_block_memory() {
  if (dynamic.bytes) memset(reinterpret_cast<void*>(dynamic.first), 0xff, dynamic.bytes);
}

void* shared_memory() { return reinterpret_cast<void*>(dynamic.first); }

}  // namespace gptlite::emu
