"""Equals of DeepSpeed's keys, as data: rules of single keys, and sections that are off or have no effect.

Read from deepspeed/runtime/config.py, zero/config.py, precision_config.py and docs/_pages/config-json.md of release
0.19.
"""

from gptlite.config.deepspeed.rows import Kind, Only, Rule, Sets

Rules = dict[str, tuple[Kind, Rule]]

BUCKETS = "in blocks: parallelism.bucket_layers"
OWN_METRICS = "metrics.jsonl has times and memory"
FASTER = "changes speed alone"
OTHER_CODE = "concerns DeepSpeed's own code"
RECOMPUTE = "turns nothing on; see parallelism.activation_checkpointing"
SAME_MEAN = "the mean is the same up to rounding"

ROOT: Rules = {
    "gradient_clipping": (Kind.number, Sets("optimizer.clip_norm")),
    "steps_per_print": (Kind.count, Sets("trainer.log_interval")),
    "sequence_parallel_size": (Kind.count, Sets("parallelism.context")),
    "prescale_gradients": (Kind.flag, SAME_MEAN),
    "gradient_predivide_factor": (Kind.number, SAME_MEAN),
    "gradient_allreduce_op": (Kind.text, Only(("mean",), "the loss is a mean over the global batch here")),
    "sparse_gradients": (Kind.flag, "changes the traffic alone: gradients are dense here"),
    "seq_parallel_communication_data_type": (Kind.text, "keys and values are exchanged, not gradients"),
    "managed_gradient_accumulation": (Kind.flag, "the training loop is gptlite's"),
    "disable_allgather": (Kind.flag, FASTER),
    "allgather_size": (Kind.number, BUCKETS),
    "zero_allow_untested_optimizer": (Kind.flag, "every optimizer here works with ZeRO"),
    "zero_force_ds_cpu_optimizer": (Kind.flag, "offloaded state is stepped by one CPU kernel"),
    "dataloader_drop_last": (Kind.flag, "samples are an endless stream, without a last batch"),
    "wall_clock_breakdown": (Kind.flag, OWN_METRICS),
    "memory_breakdown": (Kind.flag, OWN_METRICS),
    "dump_state": (Kind.flag, "the run folder has config.yaml"),
    "log_level": (Kind.text, OTHER_CODE),
    "vocabulary_size": (Kind.integer, "DeepSpeed only warns by it; ours is model.vocab_size"),
    "graph_harvesting": (Kind.flag, FASTER),
    "cuda_visible_devices": (Kind.anything, "DeepSpeed does not read it; use CUDA_VISIBLE_DEVICES"),
}
# Sections that are refused if they are on. Contents are not looked at.
REFUSED_IF_ON = {
    "curriculum_learning": "sequences have one length here: data.sequence_length",
    "data_efficiency": "neither data sampling by difficulty nor token dropping is implemented",
    "compression_training": "neither quantization nor pruning during training is implemented",
    "quantize_training": "quantization during training (MoQ) is not implemented",
    "weight_quantization": "weights are not quantized in training",
    "eigenvalue": "part of MoQ, which is not implemented",
    "progressive_layer_drop": "every layer runs in every step here",
    "sparse_attention": "attention is dense here",
    "elasticity": "the global batch is fixed here: data.global_batch_size",
    "autotuning": "searches by runs of its own; use gptlite tune",
    "hybrid_engine": "for RLHF, which gptlite does not have",
    "torch_autocast": "its casts are neither those of fp16 nor of bf16; use bf16.enabled",
    "expert_parallel": "experts are not sharded here",
    "use_data_before_expert_parallelism": "experts are not sharded here",
}
NESTED = {"compression_training"}  # on if a section in it is on
NO_EFFECT_SECTIONS = {
    "activation_checkpointing": RECOMPUTE,
    "flops_profiler": OWN_METRICS,
    "comms_logger": "trainer.profile_steps traces collectives",
    "timers": OWN_METRICS,
    "csv_monitor": "metrics.jsonl has the same rows",
    "comet": "metrics.jsonl has the same rows; trackers are logger=tensorboard, wandb",
    "checkpoint": "checkpoints load under any layout here; see conf/checkpoint/default.yaml",
    "nebula": "for saves in the background give checkpoint.async_save=true",
    "datastates": "for saves in the background give checkpoint.async_save=true",
    "aio": "state files have their own I/O: parallelism.offload_buffer_mib",
    "pipeline": "layers are balanced by cost; the degree is parallelism.pipeline",
}


def _alike(kind: Kind, rule: Rule, *names: str) -> Rules:
    """Return the same rule for several keys, given as words."""
    return {name: (kind, rule) for words in names for name in words.split()}


ZERO: Rules = {
    **_alike(
        Kind.flag,
        FASTER,
        "overlap_comm contiguous_gradients reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce",
        "round_robin_gradients memory_efficient_linear grad_hooks cpu_offload_use_pin_memory legacy_stage1",
        "save_muon_momentum_buffer_in_memory mics_hierarchical_params_gather",
    ),
    **_alike(Kind.number, BUCKETS, "allgather_bucket_size reduce_bucket_size sub_group_size"),
    **_alike(Kind.flag, OTHER_CODE, "log_trace_cache_warnings enable_sanity_checks override_module_apply"),
    **_alike(Kind.flag, OTHER_CODE, "ignore_unused_parameters pipeline_loading_checkpoint"),
    **_alike(Kind.flag, "checkpoints are fp32, for any layout", "elastic_checkpoint load_from_fp32_weights"),
    **_alike(
        Kind.flag,
        Only((False,), "traffic is not quantized here"),
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
    ),
    "zeropp_loco_param": (Kind.section, Only(({},), "traffic is not quantized here")),
    "zenflow": (Kind.section, Only((), "every parameter is updated in every step here")),
    "zero_hpz_partition_size": (Kind.integer, "a second copy of the shards: changes speed and memory alone"),
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
    "ratio": (Kind.number, "all of the optimizer's state is offloaded"),
}

SCALING: Rules = {
    "initial_scale_power": (Kind.integer, Sets("precision.initial_scale_power")),
    "loss_scale_window": (Kind.count, Sets("precision.loss_scale_window")),
    "hysteresis": (Kind.count, Sets("precision.hysteresis")),
    "min_loss_scale": (Kind.number, Sets("precision.min_loss_scale")),
}
FP16: Rules = {
    "auto_cast": (Kind.flag, "casts a model's inputs; token ids have none"),
    "consecutive_hysteresis": (Kind.flag, Only((False,), "hysteresis is restored only when the scale grows here")),
    "fp16_master_weights_and_grads": (Kind.flag, Only((False,), "master weights are fp32 here")),
}
BF16: Rules = {
    "immediate_grad_update": (Kind.flag, FASTER),
    "check_grad_overflow": (Kind.flag, "a step with a non-finite gradient is never applied"),
    "check_overflow": (Kind.flag, "a step with a non-finite gradient is never applied"),
    "bf16_master_weights_and_grads": (
        Kind.flag,
        Only((False,), "master weights are fp32; precision=bf16_stochastic has none, and rounds by chance"),
    ),
    "bf16_optimizer_states": (Kind.flag, Only((False,), "the optimizer's state is fp32; see optimizer=adamw_8bit")),
}
DATA_TYPES: Rules = {
    "grad_accum_dtype": (Kind.text, Only(("fp32",), "gradients are accumulated in fp32 here")),
    "param_dtype": (Kind.text, Only((), "the dtype of computation is precision=bf16, fp16 or fp32")),
    "buffer_dtype": (Kind.text, Only((), "buffers keep their dtype here")),
}

ADAMW_DEFAULTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
# Optimizer of DeepSpeed, or of torch: preset, and DeepSpeed's values of the keys that a JSON leaves out.
OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "adam": ("adamw", ADAMW_DEFAULTS),  # AdamW unless adam_w_mode is false
    "adamw": ("adamw", ADAMW_DEFAULTS),
    "lamb": ("lamb", {**ADAMW_DEFAULTS, "min_trust": 0.01, "max_trust": 10.0}),
    "lion": ("lion", {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}),
    "muon": ("muon", {"momentum": 0.95, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-10}),
    "sgd": ("sgd", {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}),
}
NO_OPTIMIZER = {
    "onebitadam": "its traffic is compressed to one bit",
    "onebitlamb": "its traffic is compressed to one bit",
    "zerooneadam": "its traffic is compressed to one bit",
    "adagrad": "it is not implemented; adafactor is the nearest",
    "muadam": "muP is not implemented",
    "muadamw": "muP is not implemented",
    "musgd": "muP is not implemented",
}
CORRECTED = Only((True,), "Adam's moments are always bias-corrected here")
ADAM_PARAMS: Rules = {
    "bias_correction": (Kind.flag, CORRECTED),
    "amsgrad": (Kind.flag, Only((False,), "AMSGrad is not implemented")),
    "torch_adam": (Kind.flag, FASTER),
    "fused": (Kind.flag, FASTER),
    "foreach": (Kind.flag, FASTER),
    "fp32_optimizer_states": (Kind.flag, Only((True,), "the optimizer's state is fp32 here")),
}
PARAMS: dict[str, Rules] = {
    "adam": ADAM_PARAMS,
    "adamw": ADAM_PARAMS,
    "lion": {"fp32_optimizer_states": ADAM_PARAMS["fp32_optimizer_states"]},
    "lamb": {
        "min_coeff": (Kind.number, Sets("optimizer.min_trust")),
        "max_coeff": (Kind.number, Sets("optimizer.max_trust")),
        "bias_correction": (Kind.flag, CORRECTED),
        "amsgrad": (Kind.flag, Only((False,), "AMSGrad is not implemented")),
        "eps_inside_sqrt": (Kind.flag, Only((False,), "eps is added outside the square root here")),
    },
    "muon": {
        "momentum": (Kind.number, Sets("optimizer.momentum")),
        "ns_method": (Kind.text, Only(("gram", "standard"), "no such iteration", "one iteration here, in fp32")),
    },
    "sgd": {
        "momentum": (Kind.number, Sets("optimizer.momentum")),
        "nesterov": (Kind.flag, Sets("optimizer.nesterov")),
        "dampening": (Kind.number, Only((0,), "momentum has no dampening here")),
    },
}
NO_SCHEDULE = {
    "LRRangeTest": "searches a rate rather than trains with one; sweep optimizer.lr",
    "OneCycle": "cycles of the rate and of momentum are not implemented",
}
