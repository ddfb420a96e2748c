"""Name, cores, instruction sets and memory of this machine's CPU, as the libraries may use them."""

import os

# Instruction sets of our CPU kernels, each of which includes the ones before it, with the flag that /proc/cpuinfo adds.
LEVELS = {"baseline": "", "avx2": "avx2", "avx512": "avx512f", "avx512_bf16": "avx512_bf16", "amx": "amx_bf16"}
# Highest level that a library may use, by the value of its own environment variable; unlisted values limit nothing.
LIMITS = {
    "ATEN_CPU_CAPABILITY": {"default": "baseline", "avx2": "avx2", "avx512": "amx"},  # torch's vectorized ops
    "ONEDNN_MAX_CPU_ISA": {  # oneDNN's GEMMs and convolutions
        **dict.fromkeys(("SSE41", "AVX"), "baseline"),
        **dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), "avx2"),
        **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), "avx512"),
        **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"), "avx512_bf16"),
    },
}
NEEDS = {"avx": "avx2", "fma": "avx2", "f16c": "avx2", "avx512": "avx512", "amx": "amx"}  # flags by prefix
FP16 = ("AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16")  # oneDNN's limits below fp16 instructions


def level_limit() -> str:
    """Return the highest level that the environment allows torch and oneDNN, which limits our kernels too.

    Thus one setting shows how a run behaves on an older CPU.
    """
    order = list(LEVELS)
    found = (table.get(_limit(name), order[-1]) for name, table in LIMITS.items())
    return min(found, key=order.index)


def cpu_flags() -> set[str]:
    """Return the CPU's instruction-set flags, without those above `level_limit`; empty if the operating system does not
    report them."""
    flags, limit, order = set((_cpuinfo("flags") or _cpuinfo("Features")).split()), level_limit(), list(LEVELS)
    allowed = {flag for flag in flags if order.index(_level_of(flag)) <= order.index(limit)}
    return allowed - {"avx512_fp16", "amx_fp16"} if _limit("ONEDNN_MAX_CPU_ISA") in FP16 else allowed


def cpu_name() -> str:
    """Return the name of the CPU; empty if the operating system does not report it."""
    return _cpuinfo("model name")


def cpu_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _level_of(flag: str) -> str:
    """Return the lowest level that includes a flag."""
    if flag in ("avx512_bf16", "avx512_fp16"):
        return "avx512_bf16"
    return next((level for prefix, level in reversed(NEEDS.items()) if flag.startswith(prefix)), "baseline")


def _limit(name: str) -> str:
    value = os.environ.get(name, "")
    return value.upper() if name.startswith("ONEDNN") else value.lower()


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith(key)), "")
    except OSError:
        return ""
