"""Options and fixtures of the whole suite."""

import hashlib
from collections.abc import Iterator

import pytest
import torch

LONG_SHARE = 10  # CI runs one in this many of the `long` tests


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only lose by threads: on a busy machine each op would wait 10 ms at their barrier."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long-sample", metavar="SEED", help="of the tests marked long, run only a tenth, chosen by this seed"
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--long-sample")
    return None if seed is None else f"long tests: the tenth of --long-sample={seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--long-sample")
    if seed is None:
        return
    chosen = long_sample([item.nodeid for item in items if item.get_closest_marker("long")], seed)
    left_out = [item for item in items if item.get_closest_marker("long") and item.nodeid not in chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def long_sample(names: list[str], seed: str) -> set[str]:
    """A tenth of the names, rounded up. A hash ranks them, so that a new test does not reshuffle the others."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())
    return set(ranked[: -(-len(names) // LONG_SHARE)])
