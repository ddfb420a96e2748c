"""The vocabulary of data that no run has read yet: exact where the data says it, else a guess with its reason."""

import pytest
from token_folders import write_folder

from gptlite.config import load
from gptlite.data.build import prepare
from gptlite.data.registry import Vocabulary
from gptlite.data.vocabulary import find_vocabulary
from gptlite.satellites.plan.parameters import num_parameters
from gptlite.satellites.plan.planning import make_plan
from gptlite.tokenizers.base import CharTokenizer


def silent(text):
    pass


def test_the_vocabulary_of_a_prepared_folder_is_that_of_its_tokenizer(tmp_path):
    folder = write_folder(tmp_path / "a", CharTokenizer("abc"))
    assert find_vocabulary(load(["data=tokens", f"data.path={folder}"]).data) == Vocabulary(5)
    assert find_vocabulary(load(["data=tokens", f"data.blend={{{folder}: 1.0}}"]).data) == Vocabulary(5)
    (folder / "train.meta.json").write_text("{}")
    found = find_vocabulary(load(["data=tokens", f"data.path={folder}"]).data)
    assert found.size == 50257
    assert str(folder) in found.assumed


@pytest.mark.parametrize(("kind", "size"), [("char", 256), ("byte", 257)])
def test_of_a_text_before_and_after_it_is_prepared(tmp_path, kind, size):
    (tmp_path / "text.txt").write_text("abcabc abc\n" * 200)
    data = load(["data=text", f"data.path={tmp_path / 'text.txt'}", f"data.tokenizer={kind}", "data.sequence_length=8",
                 f"data.cache_dir={tmp_path}"]).data  # fmt: skip
    before = find_vocabulary(data, silent)
    assert before.size == size
    assert bool(before.assumed) == (kind == "char")
    assert find_vocabulary(data, silent) == before  # looking has made nothing
    known = prepare(data, 1, silent).tokenizer.vocab_size
    assert find_vocabulary(data, silent) == Vocabulary(known)


def test_of_a_text_that_is_not_here():
    data = load(["data=text", "data.path=/nowhere/text.txt"]).data
    assert find_vocabulary(data, silent).size == 4096
    assert "data.vocab_size" in find_vocabulary(data, silent).assumed


def test_a_plan_counts_the_vocabulary_of_its_data(tmp_path):
    """It counted GPT-2's, which was most of a small model's parameters."""
    given = ["cluster=dgx-h100", "cluster.devices_per_node=1", "data.global_batch_size=8"]
    given += ["model.num_layers=2", "model.d_model=64"]
    folder = write_folder(tmp_path / "a")
    plan = make_plan(load(["parallelism=auto", "data=tokens", f"data.path={folder}", *given]), log=silent)
    model = plan.best.work.model
    assert model.vocab_size == 257
    assert num_parameters(model) < 200_000
    assert plan.assumed == ""
    assert plan.config.model.vocab_size is None  # the run asks its tokenizer
    plan = make_plan(load(["parallelism=auto", "data=text", "data.path=/nowhere.txt", *given]), log=silent)
    assert "data.vocab_size" in plan.assumed
