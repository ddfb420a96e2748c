// Philox4x32-10 (Salmon et al., SC'11) and its dropout mask, for CUDA, the emulator and the CPU kernels. The bits are
// those of gptlite/ops/philox.py and gptlite/ops/dropout.py.
#pragma once

#include <stdint.h>

#include "gptlite_kernels.h"

// Static: a copy shared by all files might use an instruction set that the CPU does not have.
#if defined(__CUDACC__)
#define GPTLITE_DEVICE static __host__ __device__ __forceinline__
#else
#define GPTLITE_DEVICE static inline
#endif

namespace gptlite {

// Four random words, for the elements 4 * group to 4 * group + 3 of a row.
struct PhiloxWords {
  uint32_t word[4];
};

// Parts of the counter and the key that are the same for all elements of a row.
struct DropoutRow {
  uint32_t position;
  uint32_t sample;
  uint32_t head;
  uint32_t seed;
  uint32_t site;
};

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

GPTLITE_DEVICE PhiloxWords philox(uint32_t counter0, uint32_t counter1, uint32_t counter2, uint32_t counter3,
                                  uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxMultiplier0) * counter0;
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * counter2;
    counter0 = static_cast<uint32_t>(product1 >> 32) ^ counter1 ^ key0;
    counter1 = static_cast<uint32_t>(product1);
    counter2 = static_cast<uint32_t>(product0 >> 32) ^ counter3 ^ key1;
    counter3 = static_cast<uint32_t>(product0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return PhiloxWords{{counter0, counter1, counter2, counter3}};
}

// Returns the row (batch, head, position) of a tensor [batch, heads, positions, width]. Reads device memory.
GPTLITE_DEVICE DropoutRow dropout_row(const GptliteDropout& dropout, int64_t batch, int64_t head, int64_t position) {
  const int64_t sample = dropout.sample_ids[batch];
  // Sample ids may exceed 2^32. Their upper half shares a word with the head.
  const uint32_t upper = static_cast<uint32_t>(static_cast<uint64_t>(sample) >> 32);
  return DropoutRow{static_cast<uint32_t>(dropout.first_position + position), static_cast<uint32_t>(sample),
                    static_cast<uint32_t>(dropout.first_head + head) + (upper << 16), dropout.seed,
                    static_cast<uint32_t>(dropout.site[0])};
}

GPTLITE_DEVICE PhiloxWords dropout_words(const DropoutRow& row, int64_t group) {
  return philox(static_cast<uint32_t>(group), row.position, row.sample, row.head, row.seed, row.site);
}

GPTLITE_DEVICE bool dropout_keeps(const DropoutRow& row, const GptliteDropout& dropout, int64_t column) {
  return dropout_words(row, column / 4).word[column % 4] >= dropout.threshold;
}

}  // namespace gptlite
