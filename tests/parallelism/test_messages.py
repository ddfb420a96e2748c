"""What ranks send each other arrives as it was, and runs no code."""

import errno
import math
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from gptlite.checkpoint.manifest import DamagedCheckpoint
from gptlite.config.plugins import PluginsNotNamed
from gptlite.errors import ConfigError
from gptlite.launch.rendezvous import LoopbackRendezvous
from gptlite.parallelism import messages
from gptlite.parallelism.messages import MessageError, decode, decode_error, encode, encode_error
from gptlite.satellites.monitor.stack_sampling import Place
from gptlite.satellites.monitor.verdict import Heartbeat
from gptlite.satellites.nvme.errors import OffloadFailed
from gptlite.trainer.folder import SaveFailed

VALUES = [
    None, True, 0, -(2**70), 0.1, 5e-324, math.inf, "", "naïve \udc80", b"\x00\xff", Path("a/b"), [], (), {},
    [1, (2, [3])], {1: "a", ("b", 2): [None]}, {"tuple": [1]}, [{"path": "x"}], {"dict": {"bytes": "eA=="}},
]  # fmt: skip
ERRORS = [
    ValueError("x"), KeyError(3), KeyboardInterrupt(), SystemExit(2), OSError("full"), ConfigError("a=1 is wrong"),
    FileNotFoundError(errno.ENOENT, "No such file", "a"), DamagedCheckpoint(Path("step-1"), "is gone"),
    PluginsNotNamed("plugins=x"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
]  # fmt: skip


class Marker:
    """Runs code when it is unpickled, which makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


@dataclass
class Record:
    number: int


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_arrives_as_it_was(value: object) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_types_within_a_value_stay() -> None:
    found = decode(encode(([1, (2, True)], {"a": Path("b")}, 1.0)))
    assert str(found) == "([1, (2, True)], {'a': PosixPath('b')}, 1.0)"


@pytest.mark.parametrize("value", [object(), Record(1), {1, 2}, lambda: 1, [Marker(Path("x"))]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="ranks cannot send each other a"):
        encode(value)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_arrives_as_it_was(error: BaseException) -> None:
    found = decode_error(encode_error(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


@pytest.mark.parametrize("error", [TwoArguments(1, 2), DistNetworkError("x"), ValueError(Record(1))])
def test_another_error_is_sent_as_text_only(error: BaseException) -> None:
    assert encode_error(error) == b""
    assert decode_error(b"") is None


@pytest.mark.parametrize(
    "message",
    [
        b"", b"{", b"\xff", b'{"set": []}', b'{"tuple": 1}', b'{"dict": [[1]]}', b'{"dict": [[[], 1]]}',
        b'{"bytes": "*"}', b"[" * 100_000, b'{"tuple": [], "path": "x"}',
    ],
    ids=lambda message: message[:20].decode(errors="replace"),
)  # fmt: skip
def test_a_damaged_message_is_an_error_of_its_own(message: bytes) -> None:
    with pytest.raises(MessageError):
        decode(message)


@pytest.mark.parametrize(
    "value", [("eval", ("1",)), ("Marker", ()), ("os.system", ("true",)), "ValueError", ("print", ())]
)
def test_only_the_errors_of_the_table_are_made(value: object) -> None:
    with pytest.raises(MessageError):
        decode_error(encode(value))


def test_every_error_that_ranks_raise_for_each_other_is_registered() -> None:
    for kind in (ConfigError, PluginsNotNamed, DamagedCheckpoint, OffloadFailed, SaveFailed):
        assert messages.ERRORS[kind.__name__] is kind


BEAT = Heartbeat(1, "node7", 4711, 3, 1.5, 12, Place("collective", "all_reduce", "tp", "step 12"), 0.25)


def test_a_heartbeat_arrives_as_it_was() -> None:
    assert Heartbeat.decoded(BEAT.encoded()) == BEAT
    assert Heartbeat.decoded(replace(BEAT, place=Place()).encoded()) == replace(BEAT, place=Place())


def test_anything_else_is_no_heartbeat(tmp_path: Path) -> None:
    text = BEAT.encoded()
    planted = pickle.dumps(Marker(tmp_path / "ran"))
    others = [
        planted, b"", b"[]", b"null", text.replace(b"4711", b'"4711"'), text.replace(b"4711", b"true"), text[:-1],
        text.replace(b'"host"', b'"hosts"'), text.replace(b'"tp"', b"[]"), b"[" * 100_000,
    ]  # fmt: skip
    assert [Heartbeat.decoded(each) for each in others] == [None] * len(others)
    assert not (tmp_path / "ran").exists()
    pickle.loads(planted)
    assert (tmp_path / "ran").exists()


def test_the_rendezvous_reads_nothing_from_its_store(tmp_path: Path) -> None:
    """torch's own unpickles its state, from the key torch.rendezvous.RUN_ID."""
    rendezvous = LoopbackRendezvous(RendezvousParameters("gptlite-loopback", "", "a-run", 1, 1))
    info = rendezvous.next_rendezvous()
    where = info.bootstrap_store_info
    assert where is not None
    store = TCPStore(where.master_addr, where.master_port, is_master=False)
    for key in ("torch.rendezvous.a-run", "a-run/torch.rendezvous.a-run"):
        store.set(key, pickle.dumps(Marker(tmp_path / "ran")))
    info.store.set("key", "value")
    assert rendezvous.next_rendezvous().store.get("key") == b"value"
    assert (info.rank, info.world_size, rendezvous.num_nodes_waiting()) == (0, 1, 0)
    assert not (tmp_path / "ran").exists()
