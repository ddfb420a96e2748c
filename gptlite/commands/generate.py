"""Continue a text with a trained model. The text is printed as it is generated.

gptlite generate [checkpoint=outputs/RUN] prompt="ROMEO:" \\
    [max_tokens=300] [temperature=0.8] [top_k=0] [top_p=0.95] [seed=0] [num_samples=1] [cache=true] [precision=fp32] \\
    [tokenizer=TOKENIZER] [plugins=[MODULE,...]]

checkpoint is a run folder (its newest checkpoint is used) or a step folder in one; by default, the run below outputs/
that wrote a checkpoint last (checkpoint=latest). tokenizer is for an imported checkpoint without one; it takes the same
values as in preprocess. temperature=0 always selects the most likely token; top_k=0 and top_p=1 turn these filters off.
The same seed gives the same text.
"""

import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from gptlite.config.command_line import LITERAL, run_tool
from gptlite.errors import ConfigError, printable
from gptlite.models.capabilities import Sampling, TextGeneration, required


@dataclass
class Arguments:
    """Command-line arguments."""

    checkpoint: str = "latest"
    prompt: str = field(default="\n", metadata=LITERAL)
    max_tokens: int = 300
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0
    num_samples: int = 1
    cache: bool = True
    precision: str = "fp32"
    tokenizer: str | None = None
    plugins: list[str] = field(default_factory=list)


def main() -> NoReturn:
    """Run the command line and exit."""
    run_tool(write_samples, Arguments, __doc__)


def write_samples(arguments: Arguments) -> None:
    """Generate the samples, and print their text as it is generated."""
    for key in ("max_tokens", "num_samples"):
        if (value := getattr(arguments, key)) < 1:
            raise ConfigError(f"{key}={value} must be at least 1")
    try:
        sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    from gptlite.commands.newest_run import newest_run
    from gptlite.tokenizers.base import StreamDecoder
    from gptlite.trainer.restore import restore  # imports torch, so only after the values are checked

    arguments.checkpoint = newest_run(arguments.checkpoint, "checkpoint")
    model, runner, tokenizer, *_ = restore(
        arguments.checkpoint, arguments.precision, arguments.plugins, tokenizer=arguments.tokenizer
    )
    writer = required(model.spec, TextGeneration, f"checkpoint={arguments.checkpoint}")
    prompt = tokenizer.prompt(arguments.prompt)
    # A model may write what a terminal would act on. A file receives the text as it is.
    shown = partial(printable, keep="\n\t") if sys.stdout.isatty() else str
    for index in range(arguments.num_samples):
        # StreamDecoder, since a token may end within a UTF-8 character.
        decoder, drawn = StreamDecoder(tokenizer), replace(sampling, seed=arguments.seed + index)
        print(shown(arguments.prompt), end="", flush=True)
        given = (runner, prompt, arguments.max_tokens, drawn)
        for token in writer.generate(*given, stop=tokenizer.eod, cache=arguments.cache):
            print(shown(decoder.push(token)), end="", flush=True)
        print(shown(decoder.flush()), flush=True)
