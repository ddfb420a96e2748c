"""Faults to plant in the NEON lanes, one at a time, each of which the driver must find."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NeonFault:
    """Replacement of `old`, which stands once in `file` of kernels/cpu, by `new`. `unit` is a small one that has it."""

    what: str
    file: str
    old: str
    new: str
    unit: str


KEPT = "return vshrn_n_u32(vbslq_u32((uint32x4_t)is_nan(v), bits | 0x400000u, rounded), 16);"
NEON_FAULTS = (
    NeonFault(
        "bf16 rounds halves up", "simd_memory.h", KEPT, KEPT.replace("rounded", "bits + 0x8000u"), "dropout-neon"
    ),
    NeonFault("NaN becomes infinity in bf16", "simd_memory.h", KEPT, "return vshrn_n_u32(rounded, 16);", "adamw-neon"),
    NeonFault(
        "fp16 is truncated",
        "simd_memory.h",
        "vcvt_f16_f32(v)",
        "vcvt_f16_f32(floats(words(v) & ~0x1FFFu))",
        "dropout-neon",
    ),
    NeonFault(
        "the third of three fp32 is not loaded",
        "simd_memory.h",
        "if (first.count > 2) v = vld1q_lane_f32",
        "if (first.count > 3) v = vld1q_lane_f32",
        "adamw-neon",
    ),
    NeonFault(
        "the first of two 16-bit elements is stored twice",
        "simd_memory.h",
        "vst1_lane_u16(&p[1].bits, bits, 1)",
        "vst1_lane_u16(&p[1].bits, bits, 0)",
        "dropout-neon",
    ),
    NeonFault("the product is subtracted", "simd_vector.h", "vfmaq_f32(c, a, b)", "vfmsq_f32(c, a, b)", "adamw-neon"),
    NeonFault("an estimate of the root", "simd_vector.h", "vsqrtq_f32(v)", "v * vrsqrteq_f32(v)", "adamw-neon"),
    NeonFault(
        "half of the lanes are added",
        "simd_vector.h",
        "vadd_f32(vget_low_f32(v), vget_high_f32(v))",
        "vget_low_f32(v)",
        "cross_entropy-neon",
    ),
    NeonFault("the maximum of the first lane", "simd_vector.h", "vmaxnmvq_f32(v)", "v[0]", "cross_entropy-neon"),
    NeonFault("random words occur twice", "random_words.h", "vzip2q_u64(a, b)", "vzip1q_u64(a, b)", "dropout-neon"),
    NeonFault(
        "Philox multiplies leftovers",
        "random_words.h",
        "vmovn_u64(counters)",
        "vshrn_n_u64(counters, 32)",
        "dropout-neon",
    ),
    NeonFault("groups are exchanged", "random_words.h", "Wide{0, 1} +", "Wide{1, 0} +", "dropout-neon"),
    NeonFault(
        "the lower lanes twice", "norm.cpp", "vcvt_high_f64_f32(v)", "vcvt_f64_f32(vget_low_f32(v))", "norm-neon"
    ),
    NeonFault(
        "a mask's other bytes", "simd_memory.h", "vget_low_u16(vmovl_u8", "vget_high_u16(vmovl_u8", "softmax-neon"
    ),
    NeonFault(
        "even lanes where odd ones belong",
        "attention_transpose.h",
        "vtrn2q_f32(a[2], a[3])",
        "vtrn1q_f32(a[2], a[3])",
        "attention-neon",
    ),
    NeonFault(
        "gates and values of bf16 are exchanged",
        "pairs.h",
        "to_bits(p, pairs.first), to_bits(p, pairs.second)",
        "to_bits(p, pairs.second), to_bits(p, pairs.first)",
        "bias_activation_bf16-neon_bf16",
    ),
    NeonFault("halves overlap", "lanes_bf16.h", "vextq_u16(v, v, 4)", "vextq_u16(v, v, 3)", "attention_bf16-neon_bf16"),
    NeonFault(
        "the last element of a row is lost",
        "lanes_bf16.h",
        "for (int64_t i = 0; i < part; ++i) elements[i] =",
        "for (int64_t i = 0; i < part - 1; ++i) elements[i] =",
        "weight_gradient_bf16-neon_bf16",
    ),
)
