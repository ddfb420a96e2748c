"""Published DeepSpeed configurations in this folder's `deepspeed`: their origin and what gptlite makes of them."""

DS, EXAMPLES, MEGATRON = "deepspeedai/DeepSpeed", "deepspeedai/DeepSpeedExamples", "deepspeedai/Megatron-DeepSpeed"
TRANSFORMERS, BLOOM = "huggingface/transformers", "bigscience-workshop/bigscience"
BLOOM_MEGATRON = "bigscience-workshop/Megatron-DeepSpeed"
RUN, RANKS = (), ("parallelism.data=2",)  # RANKS: the file leaves the global batch to the number of ranks
LONG = ("trainer.max_steps=100000",)  # the file's warm-up is longer than the default run
ADAMW = ("optimizer=adamw",)  # the file has no optimizer, and its offload needs one that is elementwise
# File: repository, path there, and the refused keys, or RUN, RANKS, LONG or ADAMW.
PUBLISHED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "ds-zero2-cpu-offload": (DS, "tests/model/Megatron_GPT2/ds_config_func_bs4_zero2_offload.json", RUN),
    "ds-zero0-accumulation": (DS, "tests/model/Megatron_GPT2/ds_config_func_bs8_zero0_gas3.json", RANKS),
    "ds-warmup": (DS, "tests/model/Megatron_GPT2/ds_config_func_scheduler.json", RUN),
    "ds-zero1-perf": (DS, "tests/model/Megatron_GPT2/ds_config_perf_bs8.json", RUN),
    "ds-bert-squad": (
        DS,
        "tests/model/BingBertSquad/deepspeed_bsz24_fp16_config.json",
        ("optimizer.params.bias_correction",),
    ),
    "ds-moq-eigenvalue": (
        DS,
        "tests/model/BingBertSquad/deepspeed_bsz24_fp16_eigenvalue_quantize_config.json",
        ("optimizer.params.bias_correction", "eigenvalue", "quantize_training"),
    ),
    "ds-compile-zero3": (DS, "tests/torch_compile/ds_config_z3_deepcompile_no_persist.json", RUN),
    "ds-hybrid-engine": (DS, "tests/hybrid_engine/hybrid_engine_config.json", RUN),
    "ds-zero3-allgather": (DS, "examples/sdma_allgather/ds_config_zero3.json", RANKS),
    "ds-fp32": (DS, "tests/accelerator/ds_config.json", RUN),
    "ds-tune-template": (DS, "deepspeed/autotuning/config_templates/template_zero3.json", RUN),
    "ex-zenflow": (EXAMPLES, "training/DeepSpeed-ZenFlow/finetuning/zf_config.json", ("zero_optimization.zenflow",)),
    "ex-autotuning": (EXAMPLES, "training/autotuning/hf/dsconfigs/ds_config_fp16_tune.json", ("autotuning",)),
    "ex-bf16-baseline": (EXAMPLES, "training/bf16_master_weight/configs/baseline.json", RANKS),
    "ex-bf16-full": (
        EXAMPLES,
        "training/bf16_master_weight/configs/bf16_full.json",
        (
            "gradient_accumulation_steps",
            "bf16.bf16_master_weights_and_grads",
            "bf16.bf16_optimizer_states",
            "torch_autocast",
        ),
    ),
    "ex-zero-one-adam": (
        EXAMPLES,
        "training/bing_bert/01_adam/nccl/deepspeed_bsz4k_01adam_config_seq128_nccl.json",
        LONG,
    ),
    "ex-onebit-lamb": (
        EXAMPLES,
        "training/bing_bert/1-bit_lamb/nccl/deepspeed_bsz64k_onebitlamb_config_seq128_nccl.json",
        RUN,
    ),
    "ex-lamb-sparse": (
        EXAMPLES,
        "training/bing_bert/deepspeed_bsz64k_lamb_config_seq128.json",
        ("optimizer.params.bias_correction", "sparse_attention"),
    ),
    "ex-layer-drop": (
        EXAMPLES,
        "training/bing_bert/deepspeed_bsz4k_progressive_layer_drop_config_seq128.json",
        ("optimizer.params.bias_correction", "progressive_layer_drop"),
    ),
    "ex-imagenet-zero1": (EXAMPLES, "training/imagenet/config/ds_fp16_z1_config.json", RUN),
    "ex-pipeline": (EXAMPLES, "training/pipeline_parallelism/ds_config.json", RUN),
    "ex-tensor-parallel": (EXAMPLES, "training/tensor_parallel/hf_integration/configs/ds_config.json", RUN),
    "ex-sequence-parallel": (EXAMPLES, "benchmarks/autosp/configs/autosp_config.json", RUN),
    "ex-nvme": (EXAMPLES, "inference/sglang/ds_offload_nvme_aio.json", ADAMW),
    "ex-random-ltd": (
        EXAMPLES,
        "training/data_efficiency/gpt_finetuning/config/ds_config_gpt_base_random_ltd.json",
        ("data_efficiency",),
    ),
    "ex-compression": (
        EXAMPLES,
        "compression/gpt2/config/ds_config_W8A8_Qgroup64_fp16.json",
        ("compression_training",),
    ),
    "ex-gan": (EXAMPLES, "training/gan/gan_deepspeed_config.json", RUN),
    "md-llama": (MEGATRON, "examples_deepspeed/finetune_hf_llama/ds_config.json", RUN),
    "md-universal": (MEGATRON, "examples_deepspeed/universal_checkpointing/ds_config.json", RUN),
    "md-zero1": (MEGATRON, "examples_deepspeed/curriculum_learning/ds_zero_stage_1_config_baseline.json", RUN),
    "hf-zero2": (TRANSFORMERS, "tests/deepspeed/ds_config_zero2.json", RUN),
    "hf-zero2-bf16": (TRANSFORMERS, "tests/deepspeed/ds_config_zero2_bf16.json", RUN),
    "hf-zero3": (TRANSFORMERS, "tests/deepspeed/ds_config_zero3.json", RUN),
    "bloom-176b": (BLOOM, "train/tr11-176B-ml/tr11-176B-ml.slurm", RUN),
    "bloom-13b": (BLOOM, "train/tr1-13B-base/tr1-13B-round1.slurm", RUN),
    "bloom-zero0": (BLOOM, "jz/configs/deepspeed/ds_zero0.json", RUN),
    "bloom-zero2": (BLOOM, "jz/configs/deepspeed/ds_zero2.json", RUN),
    "bloom-zero3": (BLOOM, "jz/configs/deepspeed/ds_zero3.json", RUN),
    "bloom-bf16": (BLOOM_MEGATRON, "tests/ds_config_bf16.json", RUN),
    "bloom-curriculum": (BLOOM_MEGATRON, "tests/ds_config_cl.json", ("curriculum_learning",)),
}
