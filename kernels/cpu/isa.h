// Which instruction sets to use. A file x_amx.cpp is compiled once, inside `namespace gptlite::amx`, and x_bf16.cpp inside
// `namespace gptlite::avx512_bf16` (-DGPTLITE_ISA says so too), if the compiler has the flags: else GPTLITE_NO_AMX and
// GPTLITE_NO_AVX512_BF16 are defined for dispatch.cpp, and isa() never says amx.
#pragma once

namespace gptlite {

enum class Isa { baseline, avx2, avx512, amx };  // each has what those before it have

Isa isa();               // the best that CPU, compiler and gptlite_cpu_limit_isa allow
bool has_avx512_bf16();  // isa() is at least avx512, and there is vdpbf16ps

}  // namespace gptlite
