"""Tables of gptlite's equivalents of DeepSpeed keys, and of sections that are refused or have no effect.

The keys are those of deepspeed/runtime/config.py, zero/config.py, precision_config.py and docs/_pages/config-json.md
of release 0.19.8. Keys that it no longer has, such as `amp`, are those of the last release with them.
"""

from gptlite.satellites.deepspeed.rows import Kind, Only, Rule, Sets

Rules = dict[str, tuple[Kind, Rule]]

BUCKETS = "gptlite counts buckets in blocks: parallelism.bucket_layers"
OWN_METRICS = "metrics.jsonl has times and memory"
FASTER = "affects only speed"
OTHER_CODE = "affects only DeepSpeed's own code"
RECOMPUTE = "does not turn checkpointing on; see parallelism.activation_checkpointing"
NON_FINITE = "a non-finite gradient ends the run; DeepSpeed skips the step"
SAME_MEAN = "the mean of the gradients is the same up to rounding"

ROOT: Rules = {
    "gradient_clipping": (Kind.number, Sets("optimizer.clip_norm")),
    "steps_per_print": (Kind.count, Sets("trainer.log_interval")),
    "sequence_parallel_size": (Kind.count, Sets("parallelism.context")),
    "prescale_gradients": (Kind.flag, SAME_MEAN),
    "gradient_predivide_factor": (Kind.number, SAME_MEAN),
    "gradient_allreduce_op": (Kind.text, Only(("mean",), "gptlite's loss is the mean over the global batch")),
    "sparse_gradients": (Kind.flag, "affects only communication; gptlite's gradients are dense"),
    "seq_parallel_communication_data_type": (Kind.text, "gptlite's key is precision.reduce"),
    "managed_gradient_accumulation": (Kind.flag, "gptlite has its own training loop"),
    "disable_allgather": (Kind.flag, FASTER),
    "allgather_size": (Kind.number, BUCKETS),
    "zero_allow_untested_optimizer": (Kind.flag, "all optimizers translated here work with ZeRO"),
    "zero_force_ds_cpu_optimizer": (Kind.flag, "offloaded optimizer state is updated by a CPU kernel"),
    "dataloader_drop_last": (Kind.flag, "samples are read as an endless stream, so there is no last batch"),
    "wall_clock_breakdown": (Kind.flag, OWN_METRICS),
    "memory_breakdown": (Kind.flag, OWN_METRICS),
    "dump_state": (Kind.flag, "the run folder has config.yaml"),
    "disable_python_gc": (Kind.flag, FASTER),
    "log_level": (Kind.text, OTHER_CODE),
    "vocabulary_size": (Kind.integer, "DeepSpeed uses it only for a warning; gptlite's key is model.vocab_size"),
    "graph_harvesting": (Kind.flag, FASTER),
    "cuda_visible_devices": (Kind.anything, "DeepSpeed does not read it; set the variable CUDA_VISIBLE_DEVICES"),
}
# Sections that are refused if they are enabled. Keys other than `enabled` are not checked.
REFUSED_IF_ON = {
    "curriculum_learning": "gptlite has a fixed sequence length: data.sequence_length",
    "data_efficiency": "neither data sampling by difficulty nor token dropping is implemented",
    "compression_training": "neither quantization nor pruning during training is implemented",
    "quantize_training": "quantization during training (MoQ) is not implemented",
    "weight_quantization": "quantizing weights during training is not implemented",
    "eigenvalue": "part of MoQ, which is not implemented",
    "progressive_layer_drop": "every layer runs in every step of gptlite",
    "sparse_attention": "block-sparse attention is not implemented",
    "elasticity": "elastic batch sizes are not implemented; set data.global_batch_size and parallelism.data=elastic",
    "autotuning": "DeepSpeed's autotuner is not available; use gptlite tune",
    "hybrid_engine": "it is for RLHF, which is not implemented",
    "torch_autocast": "torch.autocast applies only to models whose layers do not cast, without a key; use bf16.enabled",
    "expert_parallel": "this section is not translated; use parallelism.expert",
    "use_data_before_expert_parallelism": "the order of data and expert ranks is fixed; use parallelism.expert",
}
NESTED = {"compression_training"}  # enabled if a section in it is enabled
NO_EFFECT_SECTIONS = {
    "activation_checkpointing": RECOMPUTE,
    "flops_profiler": OWN_METRICS,
    "comms_logger": "trainer.profile_steps traces collectives",
    "timers": OWN_METRICS,
    "csv_monitor": "metrics.jsonl has the same rows",
    "comet": "metrics.jsonl has the same rows; the trackers are logger=tensorboard and logger=wandb",
    "checkpoint": "checkpoints load under any layout; see conf/checkpoint/default.yaml",
    "nebula": "for asynchronous saves set checkpoint.async_save=true",
    "datastates": "for asynchronous saves set checkpoint.async_save=true",
    "aio": "gptlite has its own file I/O; see parallelism.offload_buffer_mib",
    "pipeline": "layers are balanced by cost; the number of stages is set by parallelism.pipeline",
}


def _alike(kind: Kind, rule: Rule, *names: str) -> Rules:
    """Return `{key: (kind, rule)}` with the same rule for all keys in `names`, which are separated by spaces."""
    return {name: (kind, rule) for words in names for name in words.split()}


ZERO: Rules = {
    **_alike(
        Kind.flag,
        FASTER,
        "overlap_comm contiguous_gradients reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce",
        "round_robin_gradients memory_efficient_linear grad_hooks cpu_offload_use_pin_memory legacy_stage1",
        "save_muon_momentum_buffer_in_memory mics_hierarchical_params_gather parameter_alignment",
    ),
    "leaf_module": (Kind.section, FASTER),
    "compute_grad_norm": (Kind.flag, "gptlite always computes the norm of the gradients"),
    **_alike(Kind.number, BUCKETS, "allgather_bucket_size reduce_bucket_size sub_group_size"),
    **_alike(Kind.flag, OTHER_CODE, "log_trace_cache_warnings enable_sanity_checks override_module_apply"),
    **_alike(Kind.flag, OTHER_CODE, "ignore_unused_parameters pipeline_loading_checkpoint"),
    **_alike(Kind.flag, "checkpoints are fp32 and load under any layout", "elastic_checkpoint load_from_fp32_weights"),
    "zero_quantized_nontrainable_weights": (
        Kind.flag,
        Only((False,), "weights without a gradient are quantized as others are: zero_quantized_weights"),
    ),
    "zeropp_loco_param": (
        Kind.section,
        Only(({},), "the two hops have no error feedback; parallelism.compression=int4, without zeropp, has"),
    ),
    "zenflow": (Kind.section, Only((), "gptlite updates every parameter in every step")),
}
STAGE_3 = {  # with or without stage3_ before the name
    **_alike(
        Kind.number,
        BUCKETS,
        "prefetch_bucket_size param_persistence_threshold max_live_parameters max_reuse_distance",
        "model_persistence_threshold module_granularity_threshold",
    ),
    **_alike(Kind.flag, FASTER, "use_all_reduce_for_fetch_params allgather_sequential"),
    **_alike(
        Kind.flag,
        "see gptlite checkpoint export",
        "gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save",
    ),
}
ZERO |= {f"{prefix}{name}": rule for name, rule in STAGE_3.items() for prefix in ("", "stage3_")}
OFFLOAD: Rules = {
    **_alike(Kind.flag, FASTER, "pin_memory pipeline pipeline_read pipeline_write fast_init super_offload"),
    **_alike(Kind.number, FASTER, "buffer_count buffer_size max_in_cpu cpuadam_cores_perc"),
    "ratio": (Kind.number, "gptlite offloads the whole optimizer state"),
}

SCALING: Rules = {
    "initial_scale_power": (Kind.integer, Sets("precision.initial_scale_power")),
    "loss_scale_window": (Kind.count, Sets("precision.loss_scale_window")),
    "hysteresis": (Kind.count, Sets("precision.hysteresis")),
    "min_loss_scale": (Kind.number, Sets("precision.min_loss_scale")),
}
FP16: Rules = {
    "auto_cast": (Kind.flag, "casts the model's inputs, but token ids are integers"),
    "consecutive_hysteresis": (Kind.flag, Only((False,), "gptlite restores the hysteresis only when the scale grows")),
    "fp16_master_weights_and_grads": (Kind.flag, Only((False,), "gptlite's master weights are fp32")),
}
BF16: Rules = {
    "immediate_grad_update": (Kind.flag, FASTER),
    "check_grad_overflow": (Kind.flag, NON_FINITE),
    "check_overflow": (Kind.flag, NON_FINITE),
    "bf16_master_weights_and_grads": (
        Kind.flag,
        Only((False,), "master weights are fp32; precision=bf16_stochastic has none, and rounds stochastically"),
    ),
    "bf16_optimizer_states": (Kind.flag, Only((False,), "gptlite's optimizer state is fp32; see optimizer=adamw_8bit")),
}
DATA_TYPES: Rules = {
    "grad_accum_dtype": (Kind.text, Only(("fp32",), "gptlite accumulates gradients in fp32")),
    "param_dtype": (Kind.text, Only((), "set the compute dtype by precision=bf16, fp16 or fp32")),
    "buffer_dtype": (Kind.text, Only((), "gptlite does not convert buffers")),
    "keep_in_fp32_modules": (Kind.anything, "gptlite does not convert buffers"),
}

ADAMW_DEFAULTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
# {optimizer of DeepSpeed or torch: (preset, DeepSpeed's defaults for the keys that a JSON leaves out)}
OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "adam": ("adamw", ADAMW_DEFAULTS),  # AdamW unless adam_w_mode is false
    "adamw": ("adamw", ADAMW_DEFAULTS),  # with torch_adam, weight_decay is TORCH_DECAY
    "lamb": ("lamb", {**ADAMW_DEFAULTS, "min_trust": 0.01, "max_trust": 10.0}),
    "lion": ("lion", {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}),
    "muon": ("muon", {"momentum": 0.95, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-10}),
    "sgd": ("sgd", {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}),
    "onebitadam": ("onebit_adam", ADAMW_DEFAULTS),
    "onebitlamb": ("onebit_lamb", {**ADAMW_DEFAULTS, "min_trust": 0.01, "max_trust": 10.0}),
    "zerooneadam": ("zero_one_adam", {**ADAMW_DEFAULTS, "local_step_scaler": 32678, "local_step_clipper": 16}),
}
NO_OPTIMIZER = {
    "adagrad": "it is not implemented; the closest optimizer is adafactor",
    "muadam": "muP is not implemented",
    "muadamw": "muP is not implemented",
    "musgd": "muP is not implemented",
}
TORCH_DECAY = 0.01  # torch.optim.AdamW's default
FIRST = "its first update has the lowest rate, as in DeepSpeed"
CORRECTED = Only((True,), "gptlite always corrects the bias of Adam's moments")
FP32_STATES = (Kind.flag, Only((True,), "gptlite's optimizer state is fp32"))
ADAM_PARAMS: Rules = {
    "bias_correction": (Kind.flag, CORRECTED),
    "amsgrad": (Kind.flag, Only((False,), "AMSGrad is not implemented")),
    **_alike(Kind.flag, FASTER, "fused foreach set_grad_none"),
    "fp32_optimizer_states": FP32_STATES,
}
ONE_BIT_PARAMS: Rules = {
    "cuda_aware": (Kind.flag, OTHER_CODE),
    "comm_backend_name": (Kind.text, "gptlite exchanges signs over the data ranks' own group, on GPUs and on CPUs"),
    "bias_correction": (Kind.flag, "DeepSpeed's 1-bit optimizers do not read it; gptlite's correct the bias"),
    "amsgrad": (Kind.flag, Only((False,), "AMSGrad is not implemented")),
    "eps_inside_sqrt": (Kind.flag, Only((False,), "gptlite adds eps outside the square root")),
}
PARAMS: dict[str, Rules] = {
    "onebitadam": {**ONE_BIT_PARAMS, "freeze_step": (Kind.count, Sets("optimizer.freeze_step"))},
    "zerooneadam": {
        **ONE_BIT_PARAMS,
        "var_freeze_step": (Kind.count, Sets("optimizer.freeze_step")),
        "var_update_scaler": (Kind.count, Sets("optimizer.var_update_scaler")),
        "local_step_scaler": (Kind.count, Sets("optimizer.local_step_scaler")),
        "local_step_clipper": (Kind.count, Sets("optimizer.local_step_clipper")),
    },
    "onebitlamb": {
        **ONE_BIT_PARAMS,
        "freeze_step": (Kind.count, Sets("optimizer.freeze_step")),
        "min_coeff": (Kind.number, Sets("optimizer.min_trust")),
        "max_coeff": (Kind.number, Sets("optimizer.max_trust")),
        **{name: (Kind.number, Sets(f"optimizer.{name}")) for name in ("coeff_beta", "factor_min", "factor_max")},
        "factor_threshold": (Kind.number, Sets("optimizer.factor_threshold")),
    },
    "adam": ADAM_PARAMS,
    "adamw": ADAM_PARAMS,
    "lion": {"fp32_optimizer_states": FP32_STATES, "set_grad_none": (Kind.flag, FASTER)},
    "lamb": {
        "min_coeff": (Kind.number, Sets("optimizer.min_trust")),
        "max_coeff": (Kind.number, Sets("optimizer.max_trust")),
        "bias_correction": (Kind.flag, CORRECTED),
        "amsgrad": (Kind.flag, Only((False,), "AMSGrad is not implemented")),
        "eps_inside_sqrt": (Kind.flag, Only((False,), "gptlite adds eps outside the square root")),
    },
    "muon": {
        "momentum": (Kind.number, Sets("optimizer.momentum")),
        "ns_method": (Kind.text, Only(("gram", "standard"), "is unknown", "see optimizer.newton_schulz")),
        "adam_w_mode": (Kind.flag, Only((True,), "gptlite's Muon leaves other parameters to AdamW")),
        "per_head_muon": (Kind.flag, Only((False,), "gptlite orthogonalizes q, k and v as whole matrices")),
        "torch_adam": (Kind.flag, FASTER),
        "foreach": (Kind.flag, FASTER),
        "fp32_optimizer_states": FP32_STATES,
    },
    "sgd": {
        "momentum": (Kind.number, Sets("optimizer.momentum")),
        "nesterov": (Kind.flag, Sets("optimizer.nesterov")),
        "dampening": (Kind.number, Only((0,), "gptlite's momentum has no dampening")),
        **_alike(Kind.flag, FASTER, "fused foreach"),
    },
}
NO_SCHEDULE = {
    "LRRangeTest": "it searches for a learning rate; sweep optimizer.lr instead",
    "OneCycle": "cyclic learning rates and momenta are not implemented",
}
