// Instruction sets of the CPU kernels. Most sources are compiled once per instruction set, each time with a different
// namespace GPTLITE_ISA. Files *_amx.cpp are compiled only for `namespace gptlite::amx`, and *_bf16.cpp only for
// `namespace gptlite::avx512_bf16`, or `gptlite::neon_bf16` on ARM. If the compiler lacks the flags for these,
// GPTLITE_NO_AMX or GPTLITE_NO_BF16 is defined for dispatch.cpp, and isa() never returns them.
#pragma once

namespace gptlite {

#ifdef __aarch64__
enum class Isa { neon, neon_bf16 };  // every CPU has the first
#else
enum class Isa { baseline, avx2, avx512, avx512_bf16, amx };  // each includes the ones before it
#endif

Isa isa();  // the best that the CPU, the compiler and gptlite_cpu_limit_isa allow

}  // namespace gptlite
