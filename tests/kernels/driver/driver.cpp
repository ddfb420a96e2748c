// Runs calls of CPU kernels that record.py has recorded, and compares the results with those that are stored. Needs
// neither torch nor Python, so it runs where these do not, such as under an emulator of another processor.
//
//   driver LIBRARY CALLS [FUNCTION...]
//
// LIBRARY has the functions of gptlite_kernels.h. CALLS is the unpacked file of record.py, which describes the format.
// Runs the calls once for each instruction set that the library supports here, or only those of some functions, and
// prints a line for each set. The exit code is 0 if all results are within their tolerances.
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "gptlite_kernels.h"
#include "philox.h"

namespace {

constexpr size_t kGuard = 1024;  // bytes on either side of a buffer

[[noreturn]] void fail(const std::string& why) {
  fprintf(stderr, "%s\n", why.c_str());
  exit(2);
}

// ---- elements

float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds to nearest even: `bits` of the significand are kept, of values that are normal numbers in 16 bits, or 0.
uint16_t rounded(float value, int dtype) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (dtype == GPTLITE_BF16) return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude < 0x38800000u) {  // subnormal: in units of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(nearbyintf(float_of(magnitude) * 0x1p24f)));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13));
}

double element(const uint8_t* at, int dtype) {
  if (dtype == GPTLITE_FP32) {
    float value;
    memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits;
  memcpy(&bits, at, sizeof bits);
  if (dtype == GPTLITE_BF16) return float_of(static_cast<uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31  ? fraction ? NAN : INFINITY
                      : exponent == 0 ? ldexp(fraction, -24)
                                      : ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

// Element i of an input: the sum of four uniform numbers, a multiple of 2^-21.
float drawn(uint32_t seed, uint32_t i) {
  const gptlite::PhiloxWords words = gptlite::philox(i, 0, 0, 0, seed, 0);
  int32_t sum = -8388606;
  for (uint32_t word : words.word) sum += static_cast<int32_t>(word >> 10);
  return static_cast<float>(sum) * 0x1p-21f;
}

// ---- a recorded call

struct Buffer {
  std::vector<uint8_t> memory, before;
  size_t start, bytes;
  bool written;

  uint8_t* data() { return memory.data() + start; }
};

class Reader {
 public:
  explicit Reader(const char* path) {
    FILE* file = fopen(path, "rb");
    if (!file) fail(std::string("cannot read ") + path);
    uint8_t part[65536];
    for (size_t count; (count = fread(part, 1, sizeof part, file)) > 0;) bytes_.insert(bytes_.end(), part, part + count);
    fclose(file);
  }

  bool at_end() const { return at_ == bytes_.size(); }
  void rewind() { at_ = 0; }

  template <class T>
  T number() {
    T value;
    memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  const uint8_t* take(size_t count) {
    if (count > bytes_.size() - at_) fail("the file ends early");
    at_ += count;
    return bytes_.data() + at_ - count;
  }
  std::string text() {
    const size_t count = number<uint8_t>();
    return std::string(reinterpret_cast<const char*>(take(count)), count);
  }

  std::vector<Buffer> buffers;

  void read_buffers() {
    buffers.clear();
    for (int left = number<uint16_t>(); left > 0; --left) buffers.push_back(buffer());
    for (Buffer& each : buffers) each.before = each.memory;
    arrays_.clear();
    pointers_.clear();
    structs_.clear();
  }

  // Returns the next argument as a T.
  template <class T>
  T argument() {
    if constexpr (std::is_pointer_v<T>) {
      return static_cast<T>(pointer(static_cast<T>(nullptr)));
    } else {
      return number<char>() == 'i' ? static_cast<T>(number<int64_t>()) : static_cast<T>(number<double>());
    }
  }

 private:
  Buffer buffer() {
    const uint8_t size = number<uint8_t>();
    const char kind = number<char>();
    const bool written = number<uint8_t>() != 0;
    const uint8_t offset = number<uint8_t>();
    const size_t count = number<uint32_t>();
    Buffer made{std::vector<uint8_t>(2 * kGuard + (offset + count) * size, 0xFF), {}, kGuard + offset * size,
                count * size, written};
    if (kind == 'l') memcpy(made.data(), take(made.bytes), made.bytes);
    if (kind == 'n') {
      const uint32_t seed = number<uint32_t>();
      const int dtype = number<uint8_t>();
      for (size_t i = 0; i < count; ++i) {
        const float value = drawn(seed, static_cast<uint32_t>(i));
        const uint16_t bits = dtype == GPTLITE_FP32 ? 0 : rounded(value, dtype);
        memcpy(made.data() + i * size, dtype == GPTLITE_FP32 ? static_cast<const void*>(&value) : &bits, size);
      }
    }
    return made;
  }

  template <class T>
  void* pointer(T*) {
    switch (number<char>()) {
      case '0':
        return nullptr;
      case 'b': {
        Buffer& buffer = buffers.at(number<uint16_t>());
        return buffer.data() + number<uint32_t>();
      }
      case 'q': {  // int64_t[]
        arrays_.emplace_back(number<uint8_t>());
        for (int64_t& each : arrays_.back()) each = number<int64_t>();
        return arrays_.back().data();
      }
      case 'p': {  // void*[]
        pointers_.emplace_back(number<uint8_t>());
        for (void*& each : pointers_.back()) each = pointer(static_cast<void*>(nullptr));
        return pointers_.back().data();
      }
      case 's':
        return records(static_cast<std::remove_const_t<T>*>(nullptr));
      default:
        fail("an argument of no kind");
    }
  }

  template <class T>
  void* records(T*) {
    if constexpr (std::is_class_v<T>) {
      const size_t count = number<uint8_t>();
      structs_.emplace_back(count * sizeof(T));
      T* const all = reinterpret_cast<T*>(structs_.back().data());
      for (size_t i = 0; i < count; ++i) read(all[i]);
      return all;
    } else {
      fail("a struct where none is taken");
    }
  }
  template <class... T>
  void fields(T&... field) {
    ((field = argument<T>()), ...);
  }
  void read(GptliteDropout& s) {
    fields(s.seed, s.threshold, s.scale, s.site, s.sample_ids, s.first_position, s.first_head);
  }
  void read(GptliteLoss& s) { fields(s.ignore_index, s.first, s.z_loss, s.scale, s.gradient, s.gradient_stride); }
  void read(GptliteHeads& s) { fields(s.data, s.batch, s.head, s.position); }
  void read(GptliteAdam& s) {
    fields(s.parameter, s.gradient, s.exp_avg, s.exp_avg_sq, s.step, s.count, s.copy, s.copy_dtype);
  }

  std::vector<uint8_t> bytes_;
  size_t at_ = 0;
  // Those of a call; a vector that moves keeps its data.
  std::vector<std::vector<int64_t>> arrays_;
  std::vector<std::vector<void*>> pointers_;
  std::vector<std::vector<uint8_t>> structs_;
};

// ---- comparison

struct Totals {
  long calls = 0, elements = 0, unsupported = 0, failures = 0;
};

// Compares a part of a buffer with its expected bytes (dtype GPTLITE_BOOL), or with numbers and their tolerances.
void compare(Reader& reader, const std::string& where, bool usable, Totals& totals) {
  const int index = reader.number<uint16_t>(), dtype = reader.number<uint8_t>(), size = reader.number<uint8_t>();
  const size_t offset = reader.number<uint32_t>();
  size_t sizes[4], strides[4], count = 1;
  for (size_t& each : sizes) count *= each = reader.number<uint32_t>();
  for (size_t& each : strides) each = reader.number<uint32_t>();
  const bool exact = dtype == GPTLITE_BOOL;
  const uint8_t* const expected = reader.take(count * (exact ? size : 4));
  const uint8_t* const limits = exact ? nullptr : reader.take(count * 2);
  if (!usable) return;
  const uint8_t* const data = reader.buffers.at(index).data() + offset;
  long off = 0;
  size_t worst = 0;
  double most = -1;
  for (size_t i = 0; i < count; ++i) {
    size_t rest = i, place = 0;
    for (int dim = 3; dim >= 0; --dim, rest /= sizes[dim + 1]) place += rest % sizes[dim] * strides[dim];
    const uint8_t* const at = data + place * size;
    if (exact) {
      off += memcmp(at, expected + i * size, size) != 0;
      continue;
    }
    const double value = element(at, dtype), wanted = element(expected + 4 * i, GPTLITE_FP32);
    const double limit = element(limits + 2 * i, GPTLITE_BF16), error = fabs(value - wanted);
    const bool good = isfinite(wanted) ? error <= limit : value == wanted || (isnan(value) && isnan(wanted));
    if (good) continue;
    ++off;
    const double excess = isnan(error) ? INFINITY : error / limit;
    if (excess > most) most = excess, worst = i;
  }
  totals.elements += static_cast<long>(count);
  if (off == 0) return;
  ++totals.failures;
  printf("%s: buffer %d: %ld of %zu elements are off", where.c_str(), index, off, count);
  if (!exact) printf(", element %zu by %.3g times the tolerance", worst, most);
  printf("\n");
}

void check_memory(Reader& reader, const std::string& where, Totals& totals) {
  for (Buffer& buffer : reader.buffers) {
    const size_t end = buffer.start + buffer.bytes;
    const auto differs = [&](size_t from, size_t to) {
      return memcmp(buffer.memory.data() + from, buffer.before.data() + from, to - from) != 0;
    };
    const bool outside = differs(0, buffer.start) || differs(end, buffer.memory.size());
    if (!outside && (buffer.written || !differs(buffer.start, end))) continue;
    ++totals.failures;
    printf("%s: %s\n", where.c_str(), outside ? "written outside of a buffer" : "an input was changed");
  }
}

// ---- calls

template <class... T>
int call(void* function, int (*)(T...), Reader& reader) {
  std::tuple<T...> arguments{reader.argument<T>()...};
  return std::apply(reinterpret_cast<int (*)(T...)>(function), arguments);
}

int philox_words(uint32_t* words, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  const gptlite::PhiloxWords drawn = gptlite::philox(c0, c1, c2, c3, k0, k1);
  memcpy(words, drawn.word, sizeof drawn.word);
  return 0;
}

int call_by_name(void* library, const std::string& name, Reader& reader) {
  if (name == "philox") return call(reinterpret_cast<void*>(&philox_words), &philox_words, reader);
#define GPTLITE_CALL(kernel)                                                                     \
  if (name == #kernel) {                                                                         \
    void* const function = dlsym(library, "gptlite_cpu_" #kernel);                               \
    if (function == nullptr) fail("the library lacks " + name);                                  \
    return call(function, static_cast<decltype(&gptlite_cpu_##kernel)>(nullptr), reader);        \
  }
  GPTLITE_CALL(masked_softmax_forward)
  GPTLITE_CALL(masked_softmax_backward)
  GPTLITE_CALL(causal_softmax_forward)
  GPTLITE_CALL(causal_softmax_backward)
  GPTLITE_CALL(layer_norm_forward)
  GPTLITE_CALL(layer_norm_backward)
  GPTLITE_CALL(residual_norm_forward)
  GPTLITE_CALL(residual_norm_backward)
  GPTLITE_CALL(bias_activation_forward)
  GPTLITE_CALL(bias_activation_backward)
  GPTLITE_CALL(rope_forward)
  GPTLITE_CALL(rope_backward)
  GPTLITE_CALL(join_heads)
  GPTLITE_CALL(add_token_rows)
  GPTLITE_CALL(dropout)
  GPTLITE_CALL(cross_entropy)
  GPTLITE_CALL(cross_entropy_stats)
  GPTLITE_CALL(cross_entropy_gradient)
  GPTLITE_CALL(quantize_blocks)
  GPTLITE_CALL(dequantize_blocks)
  GPTLITE_CALL(quantize_fp8)
  GPTLITE_CALL(norm)
  GPTLITE_CALL(adamw)
  GPTLITE_CALL(attention_forward)
  GPTLITE_CALL(attention_backward)
  GPTLITE_CALL(weight_gradient)
  fail("no kernel is called " + name);
}

Totals run(void* library, Reader& reader, const std::string& isa, char** functions) {
  Totals totals;
  reader.rewind();
  if (memcmp(reader.take(8), "GPTLITE1", 8) != 0) fail("not a file of record.py");
  while (!reader.at_end()) {
    const std::string name = reader.text();
    const std::string where = isa + ", call " + std::to_string(++totals.calls) + ", " + name;
    reader.read_buffers();
    // The arguments of a call that is left out are read by calling nothing: their size is in the file.
    const size_t size = reader.number<uint32_t>();
    bool wanted = *functions == nullptr;
    for (char** each = functions; *each; ++each) wanted |= name == *each;
    int status = 0;
    if (wanted) status = call_by_name(library, name, reader);
    else reader.take(size);
    const bool unsupported = status == GPTLITE_UNSUPPORTED && name == "weight_gradient";
    totals.unsupported += unsupported;
    if (status != 0 && !unsupported) {
      ++totals.failures;
      printf("%s: returned %d\n", where.c_str(), status);
    }
    if (wanted) check_memory(reader, where, totals);
    for (int left = reader.number<uint16_t>(); left > 0; --left) {
      compare(reader, where, wanted && status == 0, totals);
    }
  }
  return totals;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) fail("usage: driver LIBRARY CALLS [FUNCTION...]");
  void* const library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(dlerror());
  const auto limit = reinterpret_cast<decltype(&gptlite_cpu_limit_isa)>(dlsym(library, "gptlite_cpu_limit_isa"));
  const auto used = reinterpret_cast<decltype(&gptlite_cpu_isa)>(dlsym(library, "gptlite_cpu_isa"));
  if (limit == nullptr || used == nullptr) fail("not a library of CPU kernels");
  Reader reader(arguments[2]);
  std::string before;
  long failures = 0;
  for (const char* isa : {"baseline", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"}) {
    if (limit(isa) != 0 || before == used()) continue;
    before = used();
    const Totals totals = run(library, reader, before, arguments + 3);
    printf("%s: %ld calls, %ld elements compared, %ld calls unsupported, %ld failures\n", before.c_str(), totals.calls,
           totals.elements, totals.unsupported, totals.failures);
    failures += totals.failures;
  }
  return failures == 0 ? 0 : 1;
}
