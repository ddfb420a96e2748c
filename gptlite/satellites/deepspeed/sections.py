"""Sections of a DeepSpeed JSON whose keys depend on each other: precision, ZeRO, trackers, tensor parallelism."""

from __future__ import annotations

from typing import Any

from gptlite.errors import did_you_mean
from gptlite.satellites.deepspeed import keys
from gptlite.satellites.deepspeed.rows import AUTO, OFF, Kind, Section

STAGE_0 = {  # DeepSpeed's faults without ZeRO
    "fp16": "as with ZeRO 1 to 3; at stage 0, DeepSpeed divides gradients by a scale that the loss lacks",
    "bf16": "as with ZeRO 1 to 3; at stage 0, DeepSpeed decays the weights once more at the start",
}
AMP_LEVELS = {"O0": "fp32", "O1": "amp_o1", "O2": "amp_o2"}


def precision(root: Section) -> str:
    """Add the rows of fp16, bf16, amp and the dtype keys, and return the compute dtype, "" if it is unknown.

    If no precision is enabled, DeepSpeed trains in fp32.
    """
    sections = {name: root.section(name) for name in ("fp16", "bf16", "bfloat16", "amp")}
    present = {name: section for name, section in sections.items() if section}
    states = {name: section.get("enabled", Kind.flag) for name, section in present.items()}
    on = [name for name, state in states.items() if state is True]
    for name, section in present.items():
        if states[name] is False:
            section.no_op("enabled", OFF)
        elif name in on[1:]:
            section.refuse("enabled", f"{on[0]} is enabled too; choose one")
            states[name] = None
    readers = {"fp16": _fp16, "bf16": _bf16, "bfloat16": _bf16, "amp": _amp}
    taken = "".join(readers[name](section, states[name]) for name, section in present.items())
    if not on and AUTO not in (*states.values(), *(root.content.get(name) for name in sections)):
        root.take("fp16 or bf16", "neither is on, so DeepSpeed trains in fp32", precision="fp32")
        taken = "fp32"
    _dtypes(root, taken)
    return taken


def _fp16(section: Section, state: Any) -> str:
    section.apply(keys.FP16)
    scale = section.value("loss_scale", Kind.number)
    if state is not True:
        for name in ("loss_scale", *keys.SCALING):
            if section.value(name, Kind.number) is not None:
                section.no_op(name, "fp16.enabled is auto" if state == AUTO else "fp16 is off")
        section.close()
        return ""
    rule = "a skipped step does not advance the schedule"
    section.take("enabled", rule, precision="fp16", precision__loss_scale_rule="deepspeed")
    if scale is not None:
        fixed = "overflow number 2 ends the run; DeepSpeed skips every overflow"
        section.take("loss_scale", fixed if scale else "0: dynamic", precision__loss_scale=scale)
    if scale:
        for name in keys.SCALING:
            if section.value(name, Kind.number) is not None:
                section.no_op(name, "the loss scale is fixed")
    else:
        section.apply(keys.SCALING)
    section.close()
    return "fp16"


def _bf16(section: Section, state: Any) -> str:
    section.apply(keys.BF16)
    section.close()
    if state is True:
        section.take("enabled", keys.NON_FINITE, precision="bf16")
    return "bf16" if state is True else ""


def _amp(section: Section, state: Any) -> str:
    level, scale = section.value("opt_level", Kind.text), section.value("loss_scale", Kind.anything)
    if state is not True:
        for name in section.content.keys() - {"enabled"}:
            section.known.add(name)
            section.no_op(name, "amp is off")
        return ""
    level = level or "O1"
    if level not in AMP_LEVELS:
        section.refuse("opt_level", f"is not implemented; use {', '.join(AMP_LEVELS)}")
        return ""
    section.take("enabled", precision=AMP_LEVELS[level])
    if "opt_level" in section.content:
        section.no_op("opt_level", f"precision={AMP_LEVELS[level]}")
    if scale == "dynamic":
        section.no_op("loss_scale", "as in gptlite")
    elif scale is not None:
        section.refuse("loss_scale", 'is not "dynamic"; set precision.loss_scale')
    section.close()
    return AMP_LEVELS[level]


def _dtypes(root: Section, compute: str) -> None:
    """Add the rows of the dtypes in which gradients are reduced over ranks and accumulated over micro-batches."""
    wanted = root.value("communication_data_type", Kind.text)
    if wanted == "fp32":
        root.take("communication_data_type", precision__reduce="fp32")
    elif wanted == compute != "":
        root.take("communication_data_type", precision__reduce="compute")
    elif wanted is not None:
        root.refuse("communication_data_type", f"is neither fp32 nor the compute dtype, {compute or 'unknown'}")
    for name in ("fp32_allreduce", "allreduce_always_fp32"):
        if root.value(name, Kind.flag):
            root.take(name, precision__reduce="fp32")
        elif name in root.content:
            root.no_op(name, OFF)
    if section := root.section("data_types"):
        section.apply(keys.DATA_TYPES)
        section.close()


def zero(root: Section, ranks: int | None, compute: str) -> None:
    """Add the rows of zero_optimization. `compute` is the compute dtype."""
    name = "zero_optimization"
    if isinstance(stage := root.content.get(name), bool):  # an old form of this key
        root.known.add(name)
        root.take(name, parallelism="zero1" if stage else "ddp")
        return
    fault = STAGE_0.get(compute, "")
    if (section := root.section(name)) is None:
        if fault and name not in root.content:
            root.no_op(name, fault)
        return
    stage = section.get("stage", Kind.integer)
    if stage in (0, 1, 2, 3) or section.content.get("stage") is None:
        section.take("stage", "" if stage else fault, parallelism=f"zero{stage}" if stage else "ddp")
    elif stage not in (None, AUTO):
        section.refuse("stage", "is not a ZeRO stage; use 0, 1, 2 or 3")
    section.apply(keys.ZERO)
    _offload(section, stage)
    _zeropp(section, stage)
    size = section.value("mics_shard_size", Kind.integer)
    if size is not None and size <= 0:
        section.no_op("mics_shard_size", OFF)
    elif size and ranks and ranks % size == 0:
        section.take("mics_shard_size", f"{ranks} / {size} replicas", parallelism__dp_replicate=ranks // size)
    elif size:
        section.no_op("mics_shard_size", f"affects only memory; gptlite's key is dp_replicate = data ranks / {size}")
    section.close()


def _offload(section: Section, stage: Any) -> None:
    """Add the rows of offload_optimizer and offload_param, and of the old forms cpu_offload and cpu_offload_param."""
    states, parameters = section.section("offload_optimizer"), section.section("offload_param")
    device = _device(states)
    for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_params"):
        old = section.value(name, Kind.flag)
        if old and name == "cpu_offload":
            section.take(name, parallelism__offload="cpu")
            device = device or "cpu"
        elif old:
            _of_parameters(section, name, stage, device)
        elif old is not None:
            section.no_op(name, OFF)
    if states and device == "nvme":
        _in_files(states, "", parallelism__offload="nvme")
    elif states and device == "cpu":
        states.take("device", parallelism__offload="cpu")
    alone = False  # True if offload_param alone names a folder, where the optimizer state is then kept too
    if parameters and (of_parameters := _device(parameters)):
        alone = of_parameters == "nvme" and not device and stage in (3, AUTO)
        if alone:
            where = "with the gradients and the optimizer state"
            _in_files(parameters, where, parallelism__offload="nvme", parallelism__offload_parameters=True)
        elif of_parameters == device == "nvme" and stage in (3, AUTO):
            where = "in the folder of offload_optimizer, with the gradients"
            parameters.take("device", where, parallelism__offload_parameters=True)
        else:
            _of_parameters(parameters, "device", stage, device)
    for each, used in ((states, device == "nvme"), (parameters, alone)):
        if each and each.value("nvme_path", Kind.text) and not used:
            each.no_op("nvme_path", "gptlite stores nothing there")


def _in_files(section: Section, where: str, **taken: Any) -> None:
    """Add the rows of an offload section that names a folder."""
    if path := section.value("nvme_path", Kind.text):
        section.take("device", where, **taken)
        section.take("nvme_path", parallelism__offload_path=path)
    else:
        section.refuse("device", "needs nvme_path, a folder on a local disk")


def _zeropp(section: Section, stage: Any) -> None:
    """Add the rows of ZeRO++."""
    flags = {"zero_quantized_weights": ("weights", "int8"), "zero_quantized_gradients": ("gradients", "int4")}
    for name, (key, codec) in flags.items():
        on = section.value(name, Kind.flag)
        if on and stage == 3:
            section.take(name, **{f"parallelism__zeropp__{key}": codec})
        elif on is not None:
            section.no_op(name, "DeepSpeed quantizes only with stage 3" if on else OFF)
    size = section.value("zero_hpz_partition_size", Kind.count)
    if size is not None and size > 1 and stage == 3:
        reason = "its backward passes gather inside nodes of so many data ranks"
        section.take(
            "zero_hpz_partition_size", reason, parallelism__zeropp__secondary=True, parallelism__zeropp__node_size=size
        )
    elif size is not None:
        section.no_op("zero_hpz_partition_size", OFF if size == 1 else "has no effect without stage 3")


def _device(section: Section | None) -> str:
    """Return the device of an offload section, or "" for none, and add the rows that do not depend on it."""
    if section is None:
        return ""
    section.known.add("nvme_path")
    device = section.value("device", Kind.text) or "none"
    section.apply(keys.OFFLOAD)
    section.close()
    if device in ("cpu", "nvme"):
        return device
    if device != "none":
        section.refuse("device", f"is not one of none, cpu, nvme{did_you_mean(device, ('none', 'cpu', 'nvme'))}")
    elif "device" in section.content:
        section.no_op("device", OFF)
    return ""


def _of_parameters(section: Section, name: str, stage: Any, optimizer: str) -> None:
    """Add the row of parameter offload, which in gptlite is part of the offload of the optimizer state."""
    if stage not in (3, AUTO):
        section.no_op(name, "DeepSpeed offloads parameters only with stage 3")
    elif optimizer:
        section.no_op(name, "parallelism.offload includes the parameters, which stay in host memory")
    else:
        section.take(name, "also offloads the optimizer state", parallelism__offload="cpu")


def trackers(root: Section) -> None:
    """Add the rows of TensorBoard and Weights & Biases. A gptlite run has at most one tracker."""
    outer = root.section("monitor_config")  # a form seen in Hugging Face's examples
    taken = ""
    for parent in filter(None, (root, outer)):
        for name in ("wandb", "tensorboard"):
            if (section := parent.section(name)) is None:
                continue
            on = section.get("enabled", Kind.flag)
            names = {"project": "project", "group": "group", "team": "entity"} if name == "wandb" else {}
            texts = {key: section.value(key, Kind.text) for key in (*names, "output_path", "job_name")}
            if on is True and not taken:
                taken = name
                section.take("enabled", logger=name)
            elif "enabled" in section.content and on != AUTO:
                section.no_op("enabled", f"logger={taken} is on, and a run has one tracker" if on else OFF)
            for key, value in texts.items():
                if value is not None and taken == name and key in names:
                    section.take(key, **{f"logger__{names[key]}": value})
                elif value is not None:
                    section.no_op(key, "files are in run.dir" if key not in names else OFF)
            section.close()
    if outer:
        outer.close()


def tensor_parallel(root: Section) -> None:
    """Add the rows of AutoTP and of compilation."""
    if section := root.section("tensor_parallel"):
        inner = section.section("tp")
        for candidate, name in ((section, "autotp_size"), (inner, "tp_size")):
            size = candidate and candidate.value(name, Kind.integer)
            if candidate and size is not None:
                if size > 1:
                    candidate.take(name, parallelism__tensor=size)
                else:
                    candidate.no_op(name, OFF)
        for name in section.content.keys() - section.known:
            section.known.add(name)
            section.no_op(name, "each model defines its own sharding plan")
    if section := root.section("compile"):
        for name in section.content:
            value = section.get(name, Kind.anything)
            if name in ("deepcompile", "enabled") and value is True:
                section.take(name, trainer__compile=True)
            elif value not in (None, AUTO):
                section.no_op(name, "gptlite's only setting for compilation is trainer.compile")
