"""Options and fixtures of the whole suite."""

import contextlib
import gc
import hashlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import composition
import pytest
import torch
from closing import closing, machine, seeds
from distributed.cells.run import Ranks

from gptlite.config import Config, compose, load
from gptlite.kernels.library import LoadedLibrary, prepare
from gptlite.kernels.library import load as load_kernels
from gptlite.kernels.toolchain import BuildError
from gptlite.start.pretrain import pretrain
from gptlite.trainer.signals import StopSignal

LINES = ("the cat sat on the mat", "a dog ran after the cat", "the mat lay under the dog", "no cat minds a mat")
TINY = """
data.tokenizer=byte data.global_batch_size=4 data.micro_batch_size=2
model=gpt-lite model.num_layers=2 model.num_heads=2 model.d_model=32 model.sequence_length=32 precision=fp32
schedule=constant schedule.warmup_steps=1 trainer.max_steps=8 trainer.log_interval=1
trainer.eval_samples=8 trainer.sample_tokens=8
""".split()
SHARES = {"quick": 6, "slow": 4, "long": 20}  # a sample is one in this many of each kind; quick ones have no mark


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only lose by threads: on a busy machine each op would wait 10 ms at their barrier."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def kernels() -> None:
    """torch.ops.gptlite, on a CPU."""
    library = load_kernels("cpu")
    assert isinstance(library, LoadedLibrary), library.reason


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """20 kB with something to learn."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i % 97} {LINES[i * i % 4]}.\n" for i in range(800)))
    return path


@pytest.fixture
def tiny(text: Path, tmp_path: Path) -> list[str]:
    """Overrides of the tiny run, but for its folder."""
    return ["data=text", f"data.path={text}", f"data.cache_dir={tmp_path / 'cache'}", *TINY]


@pytest.fixture
def run(tiny: list[str], tmp_path: Path) -> Callable[..., tuple[int, Config]]:
    """Trains the tiny run with further overrides in a folder under tmp_path; gives its exit code and configuration."""

    def train(name: str, *overrides: str) -> tuple[int, Config]:
        config = load([*tiny, f"run.dir={tmp_path / name}", f"run.name={name}", *overrides])
        return pretrain(config, stop_signal=StopSignal()).exit_code, config

    return train


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        metavar="SEED",
        help="run a sixth of the quick, a quarter of the slow and a twentieth of the long tests, chosen by this seed",
    )
    parser.addoption("--order", metavar="SEED", help="run files, and the tests of each, in an order drawn by this seed")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script, and so in what tests start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "not slow" in config.option.markexpr:
        Ranks.fork = True
        compose.compose = composition.compose


def pytest_sessionstart(session: pytest.Session) -> None:
    """The kernels compile once, before any test's time limit runs; where they cannot, the tests of them say so."""
    # torch caches its list of tensor constructors at the first use of a device context. transformers replaces some of
    # them while it loads a model, so a first use there would leave out torch.linspace for the rest of the process.
    with torch.device("meta"):
        torch.zeros(1)
    with contextlib.suppress(BuildError, OSError):
        prepare(torch.cuda.is_available(), log=print)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [machine(), *filter(None, [seeds(config)])]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    failed = [each.nodeid for kind in ("failed", "error") for each in terminalreporter.stats.get(kind, [])]
    terminalreporter.section("this run")
    for line in closing(config, failed):
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (order := config.getoption("--order")) is not None:
        # A file's tests stay together, for the fixtures that they share.
        items.sort(key=lambda item: (_rank(order, str(item.path)), _rank(order, item.nodeid)))
    seed = config.getoption("--sample")
    if seed is None:
        return
    left_out = set[str]()
    for mark, share in SHARES.items():
        names = [item.nodeid for item in items if _kind(item) == mark]
        left_out |= set(names) - sampled(names, seed, share)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def _kind(item: pytest.Item) -> str:
    return next((mark for mark in ("long", "slow") if item.get_closest_marker(mark)), "quick")


def sampled(names: list[str], seed: str, share: int) -> set[str]:
    """One in `share` of the names, rounded up. A hash ranks them, so that a new test does not reshuffle the others."""
    ranked = sorted(names, key=lambda name: _rank(seed, name))
    return set(ranked[: -(-len(names) // share)])


def pytest_collection_finish() -> None:
    gc.freeze()  # the collector need not go through thousands of tests and modules again and again
    gc.set_threshold(50_000, 20, 50)


def pytest_sessionfinish() -> None:
    Ranks.end_server()


def _rank(seed: str, name: str) -> bytes:
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()
