"""Data of a run: kinds of data, sample order and loading. Registers the core's kinds. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptlite.data.check import check_synthetic, check_tokens
from gptlite.data.config import SyntheticConfig, TokensConfig
from gptlite.data.registry import DataKind, register_kind
from gptlite.progress import Log

if TYPE_CHECKING:
    from gptlite.data.opened import OpenedData
    from gptlite.parallelism.mesh import Mesh


def _open_tokens(config: TokensConfig, seed: int, log: Log, mesh: Mesh) -> OpenedData:
    from gptlite.data.build import open_tokens

    return open_tokens(config, mesh)


def _open_synthetic(config: SyntheticConfig, seed: int, log: Log, mesh: Mesh) -> OpenedData:
    from gptlite.data.build import open_synthetic

    return open_synthetic(config, seed)


register_kind(DataKind(TokensConfig, check_tokens, _open_tokens), "tokens")
register_kind(DataKind(SyntheticConfig, check_synthetic, _open_synthetic), "synthetic")
