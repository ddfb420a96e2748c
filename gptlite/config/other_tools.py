"""Words of other tools, and the keys here that mean the same."""

# {word of another tool: key here, of the section `model`}. Words are in lower case, with _ for -, without a section.
MODEL = {
    **dict.fromkeys(("n_embd", "n_embed", "hidden_size", "hidden_dim", "embed_dim", "dim"), "d_model"),
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers", "layers", "depth"), "num_layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_attention_heads", "heads"), "num_heads"),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), "kv_heads"),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner"), "d_ff"),
}
# The same for whole keys.
KEYS = {
    **{word: f"model.{key}" for word, key in MODEL.items()},
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad", "gradient_clipping"), "optimizer.clip_norm"),
    **dict.fromkeys(("adam_beta1", "beta_1"), "optimizer.beta1"),
    **dict.fromkeys(("adam_beta2", "beta_2"), "optimizer.beta2"),
    **dict.fromkeys(("block_size", "seq_length", "seq_len", "context_length", "n_ctx"), "data.sequence_length"),
    **dict.fromkeys(("max_length", "max_seq_len", "max_position_embeddings", "n_positions"), "data.sequence_length"),
    **dict.fromkeys(("batch_size", "train_batch_size", "total_batch_size"), "data.global_batch_size"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "train_micro_batch_size_per_gpu", "micro_batch"), "data.micro_batch_size"
    ),
    **dict.fromkeys(("data_path", "data_dir", "train_file", "dataset_path"), "data.path"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epoch"), "trainer.max_epochs"),
    **dict.fromkeys(("steps", "num_steps", "max_iters", "train_iters", "total_steps"), "trainer.max_steps"),
    **dict.fromkeys(("eval_steps", "eval_every", "val_interval"), "trainer.eval_interval"),
    **dict.fromkeys(("eval_iters", "limit_val_batches"), "trainer.eval_samples"),
    **dict.fromkeys(("log_every", "logging_steps", "log_steps"), "trainer.log_interval"),
    **dict.fromkeys(("torch_compile",), "trainer.compile"),
    **dict.fromkeys(("warmup", "warmup_iters", "lr_warmup_iters", "num_warmup_steps"), "schedule.warmup_steps"),
    **dict.fromkeys(("save_steps", "save_interval", "save_every", "checkpoint_interval"), "checkpoint.interval"),
    **dict.fromkeys(("save_total_limit", "keep_last"), "checkpoint.keep"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_from", "load_checkpoint"), "checkpoint.resume"),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir", "logdir", "log_dir", "output"), "run.dir"),
    **dict.fromkeys(("run_name", "exp_name", "experiment_name"), "run.name"),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "ngpus", "devices", "dp", "dp_size"), "parallelism.data"),
    **dict.fromkeys(("nproc_per_node", "world_size", "num_processes", "data_parallel_size"), "parallelism.data"),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"), "parallelism.tensor"),
    **dict.fromkeys(
        ("pp", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size"), "parallelism.pipeline"
    ),
    **dict.fromkeys(("cp", "cp_size", "context_parallel_size"), "parallelism.context"),
    **dict.fromkeys(("ep", "ep_size", "expert_parallel_size", "expert_model_parallel_size"), "parallelism.expert"),
    **dict.fromkeys(("zero_stage", "zero_optimization"), "parallelism.zero"),
    **dict.fromkeys(("gradient_checkpointing", "recompute"), "parallelism.activation_checkpointing"),
    **dict.fromkeys(("random_seed",), "seed"),
}
# Words for which there is another way.
WAYS = {
    "device": "a run uses the GPUs that it finds; CUDA_VISIBLE_DEVICES= leaves it the CPU",
    "dtype": "choose e.g. precision=bf16",
    "fp16": "choose precision=fp16",
    "bf16": "choose precision=bf16",
    "mixed_precision": "choose e.g. precision=bf16",
    "gradient_accumulation_steps": "it is data.global_batch_size / (data.micro_batch_size x data ranks)",
    "accumulate_grad_batches": "it is data.global_batch_size / (data.micro_batch_size x data ranks)",
    "wandb": "choose logger=wandb",
    "lr_scheduler": "choose e.g. schedule=cosine",
    "lr_scheduler_type": "choose e.g. schedule=cosine",
    "dataset": "choose e.g. data=text data.path=FILE",
    "local_rank": (
        "a launcher other than torchrun added it; use torchrun, or no launcher, since parallelism.* sets the number of "
        "ranks that train.py starts"
    ),
    "config_name": "there is one root configuration; choose presets, GROUP=PRESET, or experiment=PRESET",
    "config_path": "give the folder of your own presets as --config-dir",
}


def hint(word: str) -> str:
    """Return what `word`, a key or a flag of another tool, is here: `did you mean KEY?` or another way; "" if it is not
    known."""
    name = word.strip("-").replace("-", "_").rpartition(".")[2].lower()
    if name in WAYS:
        return WAYS[name]
    return f"did you mean {KEYS[name]}?" if name in KEYS else ""
