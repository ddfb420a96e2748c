"""Opening of a run's data from its configuration, and construction of its loader."""

import numpy as np

from gptlite.data.batch_loader import BatchLoader
from gptlite.data.batches import batch_schedule
from gptlite.data.check import check_settings
from gptlite.data.config import DataConfig, DatasetConfig, SyntheticConfig, TokensConfig
from gptlite.data.indexed import token_dtype
from gptlite.data.opened import OpenedData, require_same
from gptlite.data.prepared import PreparedData, TokenSet, make_identity, open_blend
from gptlite.data.registry import kind_of
from gptlite.errors import ConfigError
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import largest_micro_batch
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import ALONE, together
from gptlite.progress import Log
from gptlite.tokenizers.base import NumberTokenizer

_SYNTHETIC_VALIDATION = 0.01  # number of held-out tokens per training token


def open_data(config: DataConfig, seed: int, log: Log, mesh: Mesh) -> OpenedData:
    """Return the data of a run. Some kinds prepare it on first use. All ranks of `mesh` must call this.

    `seed` only affects synthetic tokens. Raises ConfigError, on all ranks, for invalid settings and for data that
    cannot be opened.
    """
    return kind_of(config).open(config, seed, log, mesh)


def prepare(config: DataConfig, seed: int, log: Log = print, mesh: Mesh = ALONE) -> PreparedData:
    """Return `open_data`, for tokens only. Raises ConfigError for a dataset of samples."""
    refusal = ConfigError("data is a dataset of samples, but text or tokens are needed; choose another data=...")
    if isinstance(config, DatasetConfig):  # before it is opened
        raise refusal
    data = open_data(config, seed, log, mesh)
    if not isinstance(data, PreparedData):
        raise refusal
    return data


def build_loader(
    config: DataConfig,
    data: OpenedData,
    mesh: Mesh,
    seed: int,
    parallelism: ParallelismConfig | None = None,
) -> BatchLoader:
    """Return this rank's loader. `micro_batch_size: null` selects the largest size that the layout can run.

    Raises ConfigError if a global batch size is not divisible by the micro-batch size times the number of data-parallel
    ranks, unless fillers complete the batches of an elastic run.
    """
    layout, schedule = parallelism or ParallelismConfig(), batch_schedule(config.global_batch_size, config.batch_ramp)
    fills = layout.elastic and config.unit == "tokens"
    if (micro := 1 if layout.deterministic else config.micro_batch_size) is None:
        micro = largest_micro_batch(layout, schedule.sizes(), mesh.data_size)
    sizes = schedule.sizes()
    uneven = [size for size in sizes if micro is None or (not fills and size % (micro * mesh.data_size))]
    if micro is None or uneven:
        words = f" (in data.batch_ramp={config.batch_ramp})" if config.batch_ramp else ""
        raise ConfigError(
            f"data.global_batch_size={uneven[0]}{words} is not divisible by "
            f"{f'data.micro_batch_size={micro} x ' if micro else ''}{mesh.data_size} data-parallel ranks"
        )
    return data.loader(config, schedule, micro, mesh, seed)


def open_tokens(config: TokensConfig, mesh: Mesh) -> PreparedData:
    """Return the prepared folders of a configuration. All ranks of `mesh` must call this."""

    def opened() -> PreparedData:
        check_settings(config)
        blend = {str(folder): float(weight) for folder, weight in (config.blend or {config.path: 1.0}).items()}
        return open_blend(blend, config.sequence_length, beside=config.path if config.blend else None)

    data = together(mesh, opened)
    require_same(data.identity, mesh, "data: machines hold different tokens under the same path")
    return data


def open_synthetic(config: SyntheticConfig, seed: int) -> PreparedData:
    """Return random tokens that depend on the seed."""
    check_settings(config)
    tokenizer = NumberTokenizer(config.vocab_size)
    held_out = max(round(config.num_tokens * _SYNTHETIC_VALIDATION), config.sequence_length + 1)  # one chunk at least
    dtype = np.uint16 if token_dtype(config.vocab_size) == np.uint16 else np.int32
    tokens = np.random.default_rng(seed).integers(config.vocab_size, size=config.num_tokens + held_out, dtype=dtype)
    source = f"synthetic/{seed}/{config.num_tokens}"
    only = TokenSet("synthetic", source, tokens[: config.num_tokens], tokens[config.num_tokens :])
    identity = make_identity("synthetic", tokenizer, config.sequence_length, train=source, validation=source)
    return PreparedData("synthetic", None, tokenizer, (only,), identity)
