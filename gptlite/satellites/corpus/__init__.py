"""Preparation of text and corpora: a plug-in that comes with gptlite. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptlite.data.registry import DataKind, Vocabulary, register_kind
from gptlite.progress import Log
from gptlite.satellites.corpus.check import check_corpus, check_text
from gptlite.satellites.corpus.config import CorpusConfig, TextConfig
from gptlite.satellites.corpus.text import newly_followed

if TYPE_CHECKING:
    from gptlite.data.opened import OpenedData
    from gptlite.parallelism.mesh import Mesh


def _open(config: TextConfig | CorpusConfig, seed: int, log: Log, mesh: Mesh) -> OpenedData:
    from gptlite.satellites.corpus.prepare import open_text

    return open_text(config, log, mesh)


def _vocabulary(config: TextConfig | CorpusConfig, log: Log) -> Vocabulary:
    from gptlite.satellites.corpus.vocabulary import text_vocabulary

    return text_vocabulary(config, log)


def _why_changed(config: TextConfig) -> str:
    return newly_followed(config.path)


register_kind(DataKind(TextConfig, check_text, _open, _vocabulary, _why_changed), "text")
register_kind(DataKind(CorpusConfig, check_corpus, _open, _vocabulary), "corpus")
