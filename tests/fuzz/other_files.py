"""Files of other tools and of this machine, and messages between ranks."""

import json
import pickle
import runpy
from pathlib import Path
from unittest import mock

import numpy as np
from fuzz.mutations import json_files, octets, yaml_files
from fuzz.reader import Reader, reader
from hypothesis import strategies as st

from gptlite.config.cluster import ClusterConfig
from gptlite.launch.hostfile import read_hosts
from gptlite.parallelism import messages
from gptlite.satellites.deepspeed.expand import overrides_of, refuse
from gptlite.satellites.deepspeed.file import read as read_deepspeed
from gptlite.satellites.deepspeed.translate import translate
from gptlite.satellites.monitor.verdict import Heartbeat, judge
from gptlite.satellites.plan.local import read_calibration, write_calibration
from gptlite.unpickle import unpickle


@reader
def deepspeed(folder: Path) -> Reader:
    """A DeepSpeed configuration."""
    path = folder / "ds.json"
    valid = {
        **{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        **{"gradient_clipping": 1.0, "steps_per_print": 10, "bf16": {"enabled": True}, "fp16": {"enabled": False}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
        },
        **{"tensorboard": {"enabled": False}, "tensor_parallel": {"autotp_size": 2}},
    }

    def read(content: bytes) -> None:
        path.write_bytes(content)
        rows = translate(read_deepspeed(str(path)), 4)
        overrides_of(rows)
        refuse(str(path), rows)

    return Reader(json_files(valid), read)


@reader
def calibration(folder: Path) -> Reader:
    """Measured rates of a machine."""
    import yaml

    path = folder / "cluster.yaml"
    write_calibration(path, ClusterConfig())
    valid = yaml.safe_load(path.read_bytes())

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_calibration(path)

    return Reader(yaml_files(valid), read)


@reader
def hostfile(folder: Path) -> Reader:
    """Machines of a run."""

    def read(content: bytes) -> None:
        (folder / "hosts").write_bytes(content)
        read_hosts(folder / "hosts")

    return Reader(octets(b"# all\nnode1 slots=8\n10.0.0.3   slots = 4 # fast\nnode-2.x slots=1\n"), read)


@reader
@reader
def cifar(folder: Path) -> Reader:
    """A pickled batch of CIFAR-10."""
    with mock.patch("gptlite.models.registry.register_model"), mock.patch("gptlite.data.registry.register_data"):
        example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "resnet.py"))
    valid = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2], b"x": [b"a"]}, protocol=2)

    def read(content: bytes) -> None:
        unpickle(content, example["NAMES"], example["SETTERS"], encoding="bytes")

    return Reader(octets(valid), read, (pickle.UnpicklingError,))


@reader
def rank_message(folder: Path) -> Reader:
    """A message from another rank, and an exception of it."""
    values = [{"a": (1, 2.5, None), "b": [b"\x00\xff", "é"]}, ("ConfigError", ("words",)), ("OSError", (28, "full"))]
    valid = [json.loads(messages.encode(each)) for each in values]

    def read(content: bytes) -> None:
        for decode in (messages.decode, messages.decode_error):
            try:
                decode(content)
            except messages.MessageError:
                continue

    return Reader(st.one_of(*map(json_files, valid)), read)


@reader
def heartbeat(folder: Path) -> Reader:
    """A rank's heartbeat."""
    place = dict.fromkeys(("words",), "x")
    from dataclasses import fields

    from gptlite.satellites.monitor.stack_sampling import Place

    place = {each.name: {"str": "x", "int": 1, "bool": True}.get(str(each.type), "x") for each in fields(Place)}
    valid = {"rank": 1, "host": "n", "pid": 5, "beat": 3, "time": 5.0, "step": 2, "place": place, "stood": 1.0}

    def read(content: bytes) -> None:
        beats = [Heartbeat.decoded(content), Heartbeat.decoded(json.dumps(valid).encode())]
        judge(beats, beats, 10.0)

    return Reader(json_files(valid), read)
