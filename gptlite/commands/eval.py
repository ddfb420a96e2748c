"""Evaluate a trained model on held-out text: nats per token, perplexity, bits per byte.

gptlite eval checkpoint=outputs/RUN [data=FILE_FOLDER_OR_PRESET] [samples=N] [micro_batch_size=16] \\
    [precision=auto] [plugins=[MODULE,...]]

Without data, the run's own validation set is used. data is a text file or a folder of *.txt files, all of which is read
with the run's tokenizer; or a prepared folder or data preset of train (data=mine is ./data/mine) that has the run's
tokenizer, of which the validation set is read. samples selects that many sequences, evenly spaced. The last line is
JSON, for scripts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gptlite.config import Config, hydra_value, load, presets_of
from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.progress import log

if TYPE_CHECKING:
    from gptlite.data.prepared import PreparedData
    from gptlite.data.tokenizer import Tokenizer


@dataclass
class Arguments:
    """Command-line arguments."""

    checkpoint: str = "???"
    data: str | None = None
    samples: int | None = None
    micro_batch_size: int = 16
    precision: str = "auto"
    plugins: list[str] = field(default_factory=list)


def main() -> NoReturn:
    """Run the command line and exit."""
    run_tool(evaluate, Arguments, __doc__)


def evaluate(arguments: Arguments) -> None:
    """Evaluate the checkpoint; print the result as text, and in the last line as JSON."""
    if arguments.micro_batch_size < 1 or (arguments.samples is not None and arguments.samples < 1):
        raise ConfigError(f"micro_batch_size={arguments.micro_batch_size}, samples={arguments.samples}: at least 1")
    from gptlite.data.build import build_loader
    from gptlite.run.restore import restore
    from gptlite.trainer.eval import evaluate_sets

    model, runner, tokenizer, config = restore(arguments.checkpoint, arguments.precision, arguments.plugins)
    size = arguments.micro_batch_size
    # The run's batch sizes are for its layout, and here one process reads.
    section = replace(config.data, global_batch_size=size, micro_batch_size=size, batch_ramp=None)
    data = held_out(arguments.data, config, tokenizer)
    loader = build_loader(section, data, runner.mesh, config.seed)
    print(f"{data.num_validation_tokens:,} tokens of {data.name}", flush=True)
    result = evaluate_sets(model, runner, loader, arguments.samples, log=log)
    loader.close()
    assert result is not None
    bits = result.bits_per_byte
    words = "n/a" if bits is None else f"{bits:.4f}"
    print(f"loss {result.loss:.4f} nats per token, perplexity {result.perplexity:.2f}, {words} bits per byte")
    for name, part in result.parts.items():
        bits_words = "n/a" if part.bits_per_byte is None else f"{part.bits_per_byte:.4f}"
        print(f"  {name}: loss {part.loss:.4f}, {bits_words} bits per byte")
    row = {"loss": result.loss, "perplexity": result.perplexity, "bits_per_byte": bits, "tokens": result.tokens}
    print(json.dumps(row))


def held_out(source: str | None, config: Config, tokenizer: Tokenizer) -> PreparedData:
    """Return the data to evaluate on. Raises ConfigError for a missing source, or one with another tokenizer."""
    import numpy as np

    from gptlite.data.build import prepare
    from gptlite.data.prepared import PreparedData, TokenSet
    from gptlite.data.text import Span, find_files, scan

    prepared = source is not None and (Path(source).expanduser() / "train.idx").is_file()
    if source is not None and Path(source).expanduser().exists() and not prepared:
        files = find_files(source)
        scan(files)  # refuses what is empty or not UTF-8
        tokens: list[int] = []
        for path in files:
            tokens += [i for text in Span(path, 0, path.stat().st_size).blocks() for i in tokenizer.encode(text)]
            tokens.append(tokenizer.eod)
        array = np.array(tokens)
        return PreparedData(source, None, tokenizer, (TokenSet(source, source, array, array),), {})
    section = config.data
    if source is not None:
        presets = presets_of("data")  # with the prepared folders ./data/NAME, as in training
        if not prepared and source not in presets:
            raise ConfigError(f"data={source} is neither a path nor a preset; the presets are {', '.join(presets)}")
        given = ["data=tokens", f"data.path={hydra_value(source)}"] if prepared else [f"data={source}"]
        section = replace(load(given).data, sequence_length=section.sequence_length)
    data = prepare(section, config.seed)
    if data.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"data={source or data.name} has another tokenizer than the checkpoint; give the text itself")
    return data
