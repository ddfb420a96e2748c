"""Batches are pure functions of the number of samples before them, and validation counts each target once."""

import numpy as np
import pytest
import torch

from gptlite.data.batch_loader import Batch
from gptlite.data.batches import BatchSchedule
from gptlite.data.loader import HeldOut, Loader, Share
from gptlite.data.order import order_key, permute
from gptlite.data.prepared import open_folder
from gptlite.data.stream import SampleStream, num_chunks, read_chunk
from gptlite.errors import ConfigError
from gptlite.ops.inputs import IGNORE
from gptlite.progress import Progress
from gptlite.satellites.corpus.write import write_split
from gptlite.satellites.samples.batch import SampleBatch
from gptlite.tokenizers.base import ByteTokenizer, CharTokenizer

LENGTH, TOKENS = 8, 1003


def stream(tokens):
    return SampleStream.begin(3, LENGTH, {"name": ("d", tokens, 1.0)})


def loader(
    micro=2, total=12, rank=0, size=1, validation=100, tokens=TOKENS, ramp=None, end=None, positions=None, text=None
):
    return Loader(
        stream(np.arange(tokens, dtype=np.uint16)),
        HeldOut({"name": np.arange(validation, dtype=np.uint16)}, np.arange(TOKENS) % 5, {"name": text}),
        schedule=BatchSchedule(total, ramp),
        micro_batch_size=micro,
        device=torch.device("cpu"),
        share=Share(rank, size, positions),
        document_end=end,
    )


def test_bytes_are_those_of_the_text_where_its_pieces_have_others(tmp_path):
    """Of 100 held-out tokens with pieces of 200 bytes, 99 are targets, and the text has 300 bytes."""
    plain, changed = loader(), loader(text=300)
    pieces = int((np.arange(100) % 5).sum())
    assert (pieces, plain.validation_bytes()) == (200, 200)  # the first token, which is no target, has none
    assert changed.validation_bytes() == 300
    assert changed.validation_bytes(2) == round(plain.validation_bytes(2) * 1.5)


def test_the_text_of_a_folder_is_counted_if_its_tokenizer_may_change_it(tmp_path):
    for kind, expected in ((ByteTokenizer(), None), (CharTokenizer("ab "), 15)):
        kind.save(tmp_path / kind.kind / "tokenizer")
        for split in ("train", "val"):
            progress = Progress("tokenizing", 15, lambda _: None)
            write_split(tmp_path / kind.kind / split, [["a bé", " ba aab ba"]], kind, progress)
        (only,) = open_folder(tmp_path / kind.kind, "data", 4, "data").sets
        assert only.validation_bytes == expected


def global_batch(consumed, micro, size):
    loaders = [loader(micro, rank=rank, size=size) for rank in range(size)]
    batches = [part.batch(consumed, m) for m in range(loaders[0].num_micro_batches) for part in loaders]
    return {name: torch.cat([getattr(b, name) for b in batches]) for name in ("tokens", "targets", "sample_ids")}


@pytest.fixture
def read(monkeypatch):
    """The samples before each step that was read, by any loader."""
    steps, real = [], Loader._read
    monkeypatch.setattr(Loader, "_read", lambda self, consumed: steps.append(consumed) or real(self, consumed))
    return steps


@pytest.mark.parametrize(("count", "chunks"), [(0, 0), (1, 0), (2, 1), (8, 1), (9, 1), (10, 2), (TOKENS, 126)])
def test_chunks_cover_every_target_once(count, chunks):
    tokens = np.arange(count, dtype=np.uint16)
    assert num_chunks(tokens, LENGTH) == chunks
    rows = [read_chunk(tokens, n, LENGTH) for n in range(chunks)]
    assert [target for row in rows for target in row[1:]] == list(range(1, count))
    assert [row[0] for row in rows] == [LENGTH * n for n in range(chunks)]


def test_targets_are_the_tokens_one_further_on_and_ids_are_the_samples():
    batch = loader().batch(24, 1)
    assert torch.equal(batch.targets, batch.tokens + 1)  # the text counts upwards
    assert batch.sample_ids.tolist() == [26, 27]
    assert (batch.tokens[:, 0] // LENGTH).tolist() == permute(np.array([26, 27]), 125, order_key(3, "d", 0)).tolist()
    assert (batch.tokens.dtype, batch.targets.dtype, batch.sample_ids.dtype) == (torch.int64,) * 3


@pytest.mark.parametrize("consumed", [0, 12, 120, 9996])
def test_the_global_batch_is_the_same_however_it_is_cut(consumed):
    whole = global_batch(consumed, micro=12, size=1)
    assert whole["sample_ids"].tolist() == list(range(consumed, consumed + 12))
    for micro, size in [(1, 1), (2, 2), (1, 4), (3, 4), (4, 3), (1, 12)]:
        cut = global_batch(consumed, micro, size)
        assert all(torch.equal(cut[name], whole[name]) for name in whole)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_growing_batch_is_read_ahead_as_it_will_be_asked_for(size, read):
    readers = [loader(1, rank=rank, size=size, ramp=(4, 4, 20)) for rank in range(size)]
    ids, consumed, order = [], 0, []
    for _ in range(8):
        for micro in range(readers[0].micro_batches(consumed)):
            ids += [int(reader.batch(consumed, micro).sample_ids[0]) for reader in readers]
        order.append(consumed)
        consumed = readers[0].schedule.after(consumed)
    for reader in readers:
        reader.close()
    assert ids == list(range(3 * 4 + 1 * 8 + 4 * 12))
    assert sorted(each for each in read if each < consumed) == sorted(order * size)


def test_what_is_skipped_is_not_read():
    reader = loader(micro=4)
    first = reader.batch(0, 0)
    reader.schedule = reader.schedule.skipping([(2, 7)])
    assert reader.batch(0, 0).sample_ids.tolist() == [0, 1, 7, 8]
    reader.schedule = BatchSchedule(12)
    assert torch.equal(reader.batch(0, 0).tokens, first.tokens)
    reader.close()


def test_reading_ahead_never_changes_what_is_asked_for():
    order = [(0, 0), (0, 1), (36, 3), (0, 1), (0, 2), (0, 5), (12, 0), (24, 0)]
    reader = loader()
    for wanted in order:
        assert torch.equal(reader.batch(*wanted).tokens, loader().batch(*wanted).tokens)
    reader.close()


def test_a_whole_global_batch_is_read_ahead(read):
    """Once a step has its micro-batches, those of the next come to be without anyone asking."""
    reader = loader()
    reader.batch(0, 0)
    reader._thread.shutdown(wait=True)  # what was submitted is still done
    assert read == [0, 12]


def test_what_goes_wrong_in_the_background_reaches_the_caller(monkeypatch):
    reader = loader()
    real = Loader._read

    def broken(self, consumed):
        if consumed == 12:
            raise OSError("the disk is gone")
        return real(self, consumed)

    monkeypatch.setattr(Loader, "_read", broken)
    for m in range(6):
        reader.batch(0, m)
    for m in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            reader.batch(12, m)
    monkeypatch.undo()
    assert torch.equal(reader.batch(12, 3).tokens, loader().batch(12, 3).tokens)
    reader.close()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 9, 10, 33, 100])
def test_validation_counts_each_target_once_over_all_ranks(size, count):
    parts = [list(loader(micro=2, rank=r, size=size, validation=count).validation_batches()) for r in range(size)]
    assert len({len(part) for part in parts}) == 1  # or a collective would wait for ever
    batches = [batch for part in parts for batch in part]
    assert all(batch.tokens.shape == (2, LENGTH) for batch in batches)
    counted = torch.cat([batch.targets[batch.targets != IGNORE] for batch in batches])
    assert sorted(counted.tolist()) == list(range(1, count))
    for batch in batches:
        seen = batch.targets != IGNORE
        assert torch.equal(batch.tokens[seen] + 1, batch.targets[seen])
        assert (batch.sample_ids >= 0).all()


@pytest.mark.parametrize("limit", [None, 1, 3, 12, 13, 500])
def test_bytes_are_those_of_the_counted_targets(limit):
    reader = loader()
    counted = torch.cat([b.targets[b.targets != IGNORE] for b in reader.validation_batches(limit)])
    assert reader.validation_bytes(limit) == int((counted % 5).sum())
    rows = sum(int((b.targets != IGNORE).any(dim=1).sum()) for b in reader.validation_batches(limit))
    assert rows == min(limit or 13, 13)


def test_a_limited_validation_is_spread_over_the_text_and_always_the_same():
    first, again = ([b.sample_ids.tolist() for b in loader().validation_batches(4)] for _ in range(2))
    assert first == again == [[0, 3], [6, 9]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_a_gpu_equal_those_on_a_cpu():
    reader = loader()
    reader._device = torch.device("cuda")
    for m in range(6):
        batch = reader.batch(0, m)
        assert batch.tokens.is_cuda
        assert torch.equal(batch.tokens.cpu(), loader().batch(0, m).tokens)


def test_batches_say_where_documents_begin_and_predict_nothing_from_an_end():
    """The text counts upwards: with 20 as the end, one document ends at position 4 of the third chunk."""
    reader = loader(micro=12, end=20, tokens=97)
    rows = {int(row[0]): n for n, row in enumerate(reader.batch(0, 0).tokens)}
    batch, plain = reader.batch(0, 0), loader(micro=12, tokens=97).batch(0, 0)
    assert batch.documents.starts[rows[16]].tolist() == [0, 0, 0, 0, 0, 5, 5, 5]
    assert batch.documents.starts[[n for first, n in rows.items() if first != 16]].abs().sum() == 0
    assert torch.equal(batch.tokens, plain.tokens)
    assert (batch.targets != plain.targets).nonzero().tolist() == [[rows[16], 4]]
    assert batch.targets[rows[16], 4] == IGNORE
    assert plain.documents is None


def test_a_rank_of_a_cut_sequence_knows_all_documents():
    reader = loader(micro=12, end=20, tokens=97, positions=np.array([0, 1, 6, 7]))
    batch, whole = reader.batch(0, 0), loader(micro=12, end=20, tokens=97).batch(0, 0)
    assert torch.equal(batch.documents.starts, whole.documents.starts)
    assert torch.equal(batch.targets, whole.targets[:, [0, 1, 6, 7]])


def test_bytes_leave_out_what_is_not_predicted():
    reader = loader(end=20)
    counted = torch.cat([b.targets[b.targets != IGNORE] for b in reader.validation_batches()])
    assert sorted(counted.tolist()) == [n for n in range(1, 100) if n != 21]
    assert reader.validation_bytes() == int((counted % 5).sum())


@pytest.mark.parametrize(("dtype", "wrong"), [("uint16", 50), ("int32", 50), ("int32", -1)])
@pytest.mark.parametrize("part", ["training", "held-out"])
def test_ids_outside_the_vocabulary_are_named(dtype, wrong, part):
    whole = np.arange(50).astype(dtype)
    damaged = whole.copy()
    damaged[33] = wrong  # within the chunk of tokens 32 to 40, and in no other
    train, validation = (damaged, whole) if part == "training" else (whole, damaged)
    reader = loader(1, 1)
    reader.stream, reader._held_out = stream(train), HeldOut({"name": validation}, np.ones(50), {"name": None})

    def asked(n):
        return reader.batch(n, 0) if part == "training" else list(reader.validation_batches())[n]

    words = "sample [0-5] of the run" if part == "training" else "held-out chunk 4"
    with pytest.raises(ConfigError, match=rf"{words} has token id {wrong}, outside the vocabulary of 50: .* verify"):
        [asked(n) for n in range(6)]
    reader.close()


@pytest.mark.parametrize("kind", [Batch, SampleBatch])
def test_a_filler_stays_one_on_another_device(kind):
    filler = kind(*(torch.zeros(2, 3, dtype=torch.int64) for _ in range(3)), counted=False)
    moved = filler.to(torch.device("meta"))
    assert not moved.counted
    assert type(moved) is kind
    assert {tensor.device.type for tensor in (moved.tokens, moved.targets, moved.sample_ids)} == {"meta"}
