"""`gptlite data show` prints what the model was fed, of whichever step of whichever run."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from run_files import without_plots
from token_folders import documents, write_folder

from gptlite.data.indexed import IndexedDataset
from gptlite.data.loader import Batch, Loader
from gptlite.data.order_log import FILE_NAME
from gptlite.satellites.data_tool import command  # noqa: F401 (the fixture `tool` calls it)

END, MARK = 256, "\n<<< end of document >>>\n"
Show = Callable[..., tuple[int, str, str]]
Samples = dict[int, str]


@pytest.fixture
def show(tool: Callable) -> Show:
    """Runs `show` in this process; gives the exit code and both outputs."""
    return partial(tool, "show")


@pytest.fixture
def fed(run: Callable, tmp_path: Path) -> Callable[..., dict[int, Samples]]:
    """Trains in tmp_path / "run" and gives, by step, the samples it was fed: number and tokens, as text."""
    steps: dict[int, Samples] = {}

    def train(*overrides: str) -> dict[int, Samples]:
        original, step = Loader.batch, max(steps, default=0)

        def batch(self: Loader, consumed_samples: int, micro_index: int) -> Batch:
            nonlocal step
            given, step = original(self, consumed_samples, micro_index), step + (micro_index == 0)
            for number, tokens in zip(given.sample_ids.tolist(), given.tokens.tolist(), strict=True):
                steps.setdefault(step, {})[number] = text_of(tokens)
            return given

        with patch.object(Loader, "batch", batch), without_plots():
            assert run("run", *overrides)[0] == 0
        return steps

    return train


@pytest.fixture
def blend(tmp_path: Path) -> list[str]:
    """Overrides: two prepared folders, with letters of two bytes, which the ends of samples cut."""
    web, code = write_folder(tmp_path / "web"), write_folder(tmp_path / "code")
    return ["data=tokens", f"data.blend={{{web}: 0.7, {code}: 0.3}}"]


@pytest.fixture
def blended(tiny: list[str], blend: list[str]) -> None:
    """The tiny run reads the blend."""
    tiny[:] = [*blend, *(each for each in tiny if not re.match(r"data(=|\.path|\.tokenizer|\.cache)", each))]


def text_of(tokens: list[int]) -> str:
    """Bytes as text; 256 ends a document."""
    pieces, piece = [], bytearray()
    for token in tokens:
        if token == END:
            pieces.append(piece)
            piece = bytearray()
        else:
            piece.append(token)
    return MARK.join(each.decode(errors="replace") for each in [*pieces, piece])


def parse(output: str) -> dict[int, tuple[str, str]]:
    """Of what `show` printed of a run: by sample, where it is from, and its text."""
    _, *parts = re.split(r"\nsample (\d+): (.*)\n", output)
    return {int(n): (where, text[:-1]) for n, where, text in zip(*[iter(parts)] * 3, strict=True)}


def check(show: Show, folder: Path, steps: dict[int, Samples]) -> None:
    """Every step, and every sample by itself, is what was fed."""
    for step, samples in steps.items():
        code, output, errors = show(folder, f"step={step}")
        assert code == 0, errors
        assert output.splitlines()[0] == f"step {step} of {folder}: samples {min(samples)} to {max(samples)}"
        assert {number: text for number, (_, text) in parse(output).items()} == samples
        ends = (min(samples), max(samples))[:: -1 if step % 2 else 1]  # with its step, the first one or the last
        for number, more in zip(ends, ([], [f"step={step}"]), strict=True):
            found = parse(show(folder, f"sample={number}", *more)[1])
            assert {n: text for n, (_, text) in found.items()} == {number: samples[number]}


@pytest.mark.usefixtures("blended")
def test_a_step_of_a_blend_shows_what_was_fed_and_where_it_is(show: Show, fed: Callable, tmp_path: Path):
    steps = fed("trainer.max_steps=4")
    assert sorted(steps) == [1, 2, 3, 4]
    check(show, tmp_path / "run", steps)
    folders = set()
    for step in steps:
        for where, text in parse(show(tmp_path / "run", f"step={step}")[1]).values():
            found = re.fullmatch(r"(.+), epoch 0, tokens ([\d,]+) to ([\d,]+), documents? (\d+)(?: to (\d+))?", where)
            assert found, where
            start, stop, first, last = (int((each or found[4]).replace(",", "")) for each in found.groups()[1:])
            dataset = IndexedDataset(Path(found[1]) / "train")
            folders.add(Path(found[1]).name)
            assert text_of(dataset.tokens[start : stop + 1].tolist()) == text
            before = [int((dataset.tokens[:at] == END).sum()) for at in (start, stop)]
            assert [first, last] == before
    assert folders == {"web", "code"}


@pytest.mark.usefixtures("blended")
@pytest.mark.slow
def test_steps_of_a_growing_batch(show: Show, fed: Callable, tmp_path: Path):
    steps = fed("trainer.max_steps=6", "data.batch_ramp=[2,2,6]")
    assert [len(samples) for samples in steps.values()] == [2, 2, 2, 4, 4, 4]
    check(show, tmp_path / "run", steps)


@pytest.mark.usefixtures("blended")
@pytest.mark.slow
def test_steps_of_either_sequence_length_and_of_other_weights(show: Show, fed: Callable, tmp_path: Path):
    fed("trainer.max_steps=2")
    fed("trainer.max_steps=4", "data.sequence_length=16")
    other = f"data.blend={{{tmp_path / 'web'}: 0.1, {tmp_path / 'code'}: 0.9}}"
    steps = fed("trainer.max_steps=6", "data.sequence_length=16", other)
    assert list(steps[6]) == [20, 21, 22, 23]
    assert all(len(text) <= 16 for text in steps[3].values() if MARK not in text)
    check(show, tmp_path / "run", steps)


@pytest.mark.slow
def test_a_run_of_before_there_was_a_record(show: Show, fed: Callable, tmp_path: Path):
    steps = fed("trainer.max_steps=4")
    (tmp_path / "run" / FILE_NAME).unlink()
    check(show, tmp_path / "run", steps)


@pytest.mark.slow
@pytest.mark.usefixtures("blended")
def test_a_growing_batch_of_before_there_was_a_record_is_counted(show: Show, fed: Callable, tmp_path: Path):
    """The samples that a step begins with are those that metrics.jsonl has counted."""
    steps = fed("trainer.max_steps=6", "data.batch_ramp=[2,2,6]")
    (tmp_path / "run" / FILE_NAME).unlink()
    check(show, tmp_path / "run", steps)


def test_a_prepared_folder_is_shown_in_the_order_of_its_file(show: Show, tmp_path: Path):
    folder = write_folder(tmp_path / "web")
    for split, length in (("train", 256), ("val", 50)):
        tokens = IndexedDataset(folder / split).tokens.tolist()
        text = b"".join(
            each.encode() + b"|" for each in documents(sum(b"web") + (split == "val"), 60 if length > 50 else 8)
        )
        assert len(tokens) == len(text)
        more = [] if split == "train" else ["split=val", f"sequence_length={length}"]
        count = -(-(len(tokens) - 1) // length)
        for sample in range(count):
            start = sample * length
            code, output, _ = show(folder, f"sample={sample}", *more)
            first, _, rest = output.partition("\n")
            stop = min(start + length, len(tokens)) - 1
            assert (code, rest) == (0, text_of(tokens[start : stop + 1]) + "\n")
            assert first.startswith(f"sample {sample} of {folder / split}: tokens {start:,} to {stop:,}, document")
            assert rest[:-1] == text[start : stop + 1].decode(errors="replace").replace("|", MARK)
        code, output, errors = show(folder, f"sample={count}", *more)
        assert (code, output) == (2, "")
        assert errors.startswith(f"error: sample={count}: {folder / split} has {count} samples of {length} tokens, ")


def test_what_there_is_not_is_refused_in_a_line(show: Show, fed: Callable, tmp_path: Path):
    folder, prepared = tmp_path / "run", write_folder(tmp_path / "web")
    fed("trainer.max_steps=2")
    end = f"the run in {folder} ends with"
    for arguments, line in {
        (folder,): "give step=N, or sample=N",
        (folder, "step=3"): f"step=3: {end} step 2 (trainer.max_steps)",
        (folder, "step=0"): "step=0 must be at least 1",
        (folder, "sample=-1"): "sample=-1 must be at least 0",
        (folder, "sample=8"): f"sample=8: {end} sample 7 in step 2 (trainer.max_steps)",
        (folder, "step=1", "sample=4"): "sample=4: step 1 read samples 0 to 3; leave out step, or sample",
        (folder, "step=one"): "step=one: ",
        (folder, "stpe=1"): "stpe is not a key of this tool; did you mean step?",
        (prepared, "step=1"): f"step=1 needs a run folder, and {prepared} has no config.yaml; give sample=N",
        (prepared,): "sample is not set; give sample=N",
        (prepared, "sample=0", "sequence_length=0"): "sequence_length=0 must be at least 1",
        (prepared, "sample=0", "split=vla"): f"split=vla: {prepared} has train, val",
        (tmp_path / "nowhere", "sample=0"): f"{tmp_path / 'nowhere'} does not exist; give a prepared folder",
    }.items():
        code, output, errors = show(*arguments)
        assert (code, output, errors.count("\n")) == (2, "", 1), errors
        assert errors.startswith(f"error: {line}")
