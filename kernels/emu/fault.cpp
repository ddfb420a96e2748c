// Fault messages, with the kernel's name and source lines from addr2line.
#include "fault.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <string>

#include "block.h"

namespace gptlite::emu {
namespace {

struct Fault {
  char message[512];
  const void* code;
  const void* other;  // code of the earlier of two accesses, or NULL
  uint3 block;
  uint3 thread;
};

Fault first{};
std::string description;

// Returns the output of `addr2line` for an address in this library.
std::string addr2line(const void* code, const char* option) {
  Dl_info info;
  if (!code || !dladdr(code, &info)) return "";
  char command[1200];
  snprintf(command, sizeof command, "addr2line -C %s -e '%s' %#zx 2>/dev/null", option, info.dli_fname,
           static_cast<size_t>(static_cast<const char*>(code) - static_cast<const char*>(info.dli_fbase)));
  FILE* pipe = popen(command, "r");
  if (!pipe) return "";
  std::string text;
  char part[1024];
  while (fgets(part, sizeof part, pipe)) text += part;
  pclose(pipe);
  return text;
}

// Returns the source line of a call, given its return address, and the lines that it was inlined into:
// "load.cuh:12 < forward.cu:34". Lines of emu/cuda.h are left out.
std::string lines(const void* code) {
  const std::string text = addr2line(static_cast<const char*>(code) - 1, "-i");
  std::string found;
  for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
    std::string line = text.substr(at, end - at);
    if (line.find("/emu/cuda.h") == std::string::npos) {
      line = line.substr(line.rfind('/') + 1);  // before the search for a space, which a folder name may contain
      found += (found.empty() ? "" : " < ") + line.substr(0, line.find(' '));  // without "(discriminator 2)"
    }
  }
  return found.empty() ? "an unknown line" : found;
}

// Returns the name of a kernel with its template arguments, but without its parameter list.
std::string kernel_name(const void* kernel) {
  std::string name = addr2line(kernel, "-f");
  name = name.substr(0, name.find('\n'));
  if (!name.empty() && name.back() == ')') {
    int depth = 0;
    size_t at = name.size();
    do depth += name[--at] == ')' ? 1 : name[at] == '(' ? -1 : 0;
    while (at > 0 && depth > 0);
    name.resize(at);
  }
  if (name.rfind("void ", 0) == 0) name.erase(0, 5);
  for (const char* noise : {"gptlite::", "(anonymous namespace)::"})
    for (size_t at; (at = name.find(noise)) != std::string::npos;) name.erase(at, strlen(noise));
  return name;
}

void keep(const void* code, const void* other) {
  first.code = code;
  first.other = other;
  if (!running.kernel) {
    description = std::string(first.message) + ", in the launcher at " + lines(code);
    return;
  }
  first.block = block_index();
  first.thread = thread_index();
  leave_block();
}

}  // namespace

void fault(const void* code, const char* format, ...) {
  if (faulted()) return;
  va_list values;
  va_start(values, format);
  vsnprintf(first.message, sizeof first.message, format, values);
  va_end(values);
  keep(code, nullptr);
}

void fault_between(const void* code, const void* other, const char* message) {
  if (faulted()) return;
  snprintf(first.message, sizeof first.message, "%s", message);
  keep(code, other);
}

bool faulted() { return first.code != nullptr; }

void forget_fault() {
  first = {};
  description.clear();
}

void describe_fault(const void* kernel) {
  char who[160];
  snprintf(who, sizeof who, ", by thread (%u, %u, %u) of block (%u, %u, %u)", first.thread.x, first.thread.y,
           first.thread.z, first.block.x, first.block.y, first.block.z);
  description = kernel_name(kernel) + ": " + first.message;
  if (first.other) description += " at " + lines(first.other);
  description += who + (" at " + lines(first.code));
}

}  // namespace gptlite::emu

extern "C" const char* gptlite_emu_error() { return gptlite::emu::description.c_str(); }
