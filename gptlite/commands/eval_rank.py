"""Evaluation by one process, or by one rank of a layout.

gptlite/launch/elastic.py starts a rank as `python -m gptlite.commands.eval_rank ARGUMENTS FOLDER STARTED LAUNCHER`.
ARGUMENTS is JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlite.commands.eval_arguments import Arguments
from gptlite.config.compose import load
from gptlite.config.keys import presets_of
from gptlite.config.overrides import hydra_value
from gptlite.config.schema import Config
from gptlite.errors import ConfigError, printable
from gptlite.parallelism.config import ParallelismConfig
from gptlite.progress import log

if TYPE_CHECKING:
    from gptlite.data.prepared import PreparedData
    from gptlite.tokenizers.base import Tokenizer
    from gptlite.trainer.restore import Restored


def on_rank(arguments: Arguments, config: Config, *_: Any) -> int:
    """Evaluate on a rank that has joined the process group, in the configuration's layout. Return the exit code."""
    evaluate(arguments, config.parallelism)
    return 0


def evaluate(arguments: Arguments, layout: ParallelismConfig | None = None) -> None:
    """Evaluate the checkpoint. Rank 0 prints the result as text, followed by a line of JSON."""
    from gptlite.trainer.restore import restore

    restored = restore(arguments.checkpoint, arguments.precision, arguments.plugins, layout, arguments.tokenizer)
    if arguments.tasks is None:
        evaluate_text(arguments, restored)
    else:
        evaluate_tasks(arguments, restored)
    restored.runner.mesh.close()


def evaluate_text(arguments: Arguments, restored: Restored) -> None:
    """Evaluate on held-out text: nats per token, perplexity, bits per byte."""
    from gptlite.data.build import build_loader
    from gptlite.parallelism.rank_sync import together
    from gptlite.trainer.eval import evaluate_sets

    config, mesh, size = restored.config, restored.runner.mesh, arguments.micro_batch_size
    # The run's batch sizes may not fit this layout.
    section = replace(config.data, global_batch_size=size * mesh.data_size, micro_batch_size=size, batch_ramp=None)
    data = together(mesh, lambda: held_out(arguments.data, config, restored.tokenizer))
    loader = build_loader(section, data, mesh, config.seed)
    if mesh.is_main:
        print(printable(f"{data.num_validation_tokens:,} tokens of {data.name}"), flush=True)
    quiet = log if mesh.is_main else lambda _: None
    result = evaluate_sets(restored.model, restored.runner, loader, arguments.samples, log=quiet)
    loader.close()
    assert result is not None
    if not mesh.is_main:
        return
    bits = result.bits_per_byte
    words = "n/a" if bits is None else f"{bits:.4f}"
    print(f"loss {result.loss:.4f} nats per token, perplexity {result.perplexity:.2f}, {words} bits per byte")
    for name, part in result.parts.items():
        bits_words = "n/a" if part.bits_per_byte is None else f"{part.bits_per_byte:.4f}"
        print(printable(f"  {name}: loss {part.loss:.4f}, {bits_words} bits per byte"))
    row = {"loss": result.loss, "perplexity": result.perplexity, "bits_per_byte": bits, "tokens": result.tokens}
    print(json.dumps(row))


def evaluate_tasks(arguments: Arguments, restored: Restored) -> None:
    """Evaluate on tasks of lm-eval, which only rank 0 calls, and write the results to a file."""
    from gptlite.satellites.harness.ranks import SharedScorer
    from gptlite.satellites.harness.scorer import Scorer

    config, mesh = restored.config, restored.runner.mesh
    quiet = log if mesh.is_main else lambda _: None
    scorer = Scorer(restored.model, restored.runner, restored.tokenizer, arguments.micro_batch_size, quiet)
    shared = SharedScorer(scorer, mesh)
    with shared.serving() as main:
        if not main:
            return
        from gptlite.satellites.harness.lm import GptliteLM
        from gptlite.satellites.harness.tasks import Tasks, figures, results_file, run_tasks, table, write_results

        spec = restored.model.spec
        length = spec.max_length(config.model) or config.data.sequence_length
        names = arguments.task_names
        folder = None if arguments.include_path is None else str(Path(arguments.include_path).expanduser())
        lm = GptliteLM(shared, spec, restored.tokenizer, length)
        results = run_tasks(lm, Tasks(names, arguments.limit, arguments.num_fewshot, folder))
        path = Path(arguments.output).expanduser() if arguments.output else results_file(restored.path, names)
        write_results(results, path, {"checkpoint": str(restored.path), "arguments": asdict(arguments)})
        print(printable(table(results), "\n"))
        print(printable(f"results: {path}"))
        print(json.dumps(figures(results)), flush=True)


def held_out(source: str | None, config: Config, tokenizer: Tokenizer) -> PreparedData:
    """Return the data to evaluate on. Raises ConfigError if the source is missing or has another tokenizer."""
    import numpy as np

    from gptlite.data.build import prepare
    from gptlite.data.prepared import PreparedData, TokenSet
    from gptlite.satellites.corpus.cuts import encoded
    from gptlite.satellites.corpus.text import Span, find_files, scan

    prepared = source is not None and (Path(source).expanduser() / "train.idx").is_file()
    if source is not None and Path(source).expanduser().exists() and not prepared:
        files = find_files(source)
        scan(files)  # refuses files that are empty or not UTF-8
        tokens: list[np.ndarray] = []
        for path in files:
            tokens += [ids for ids, _ in encoded(tokenizer, Span(path, 0, path.stat().st_size))]
            tokens.append(np.array([tokenizer.eod], dtype=np.int32))
        array, size = np.concatenate(tokens), sum(path.stat().st_size for path in files)
        if len(array) < 2:
            raise ConfigError(f"data={source} has one token, before which there is none to predict it; give more text")
        return PreparedData(source, None, tokenizer, (TokenSet(source, source, array, array, 1.0, size),), {})
    section = config.data
    if source is not None:
        presets = presets_of("data")  # including the prepared folders ./data/NAME, as in training
        if not prepared and source not in presets:
            raise ConfigError(f"data={source} is neither a path nor a preset; the presets are {', '.join(presets)}")
        given = ["data=tokens", f"data.path={hydra_value(source)}"] if prepared else [f"data={hydra_value(source)}"]
        section = replace(load(given).data, sequence_length=section.sequence_length)
    data = prepare(section, config.seed)
    if data.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"data={source or data.name} has another tokenizer than the checkpoint; give the text files")
    return data


if __name__ == "__main__":
    from gptlite.launch.worker import main

    main(sys.argv[2:], partial(on_rank, Arguments(**json.loads(sys.argv[1]))))
