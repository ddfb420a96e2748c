"""lm-eval's interface: answers of transformers' adapter on the exported model, and the offline tasks.

lm-eval is in the extra `dev`. Without it, test_contract.py still calls the adapter as lm-eval does.
"""

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from checkpoint.huggingface_models import committed

from gptlite.errors import ConfigError
from gptlite.satellites.checkpoint_tool.huggingface import EXPORTED, export, import_
from gptlite.satellites.harness.ranks import SharedScorer
from gptlite.satellites.harness.scorer import Scorer
from gptlite.tokenizers.sentence_piece import SentencePieceTokenizer
from gptlite.trainer.restore import restore
from harness.models import END, MODELS, PAIRS, PROMPTS, TEXTS, VOCABULARY, requests, saved, tokenizer

pytest.importorskip("lm_eval")

TASKS = Path(__file__).parent / "tasks"
NAMES = "offline_choice,offline_write,offline_rolling"


def ours(step: Path, batch_size: int) -> Any:
    from gptlite.satellites.harness.lm import GptliteLM

    found = restore(str(step), "fp32")
    scorer = Scorer(found.model, found.runner, found.tokenizer, batch_size, print)
    return GptliteLM(SharedScorer(scorer, found.runner.mesh), found.model.spec, found.tokenizer, 32)


def theirs(step: Path, folder: Path, kind: str) -> Any:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    export(step, folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(kind), eos_token=END, pad_token=END)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return HFLM(pretrained=model, tokenizer=fast, batch_size=1, max_length=32, device="cpu")


@pytest.fixture(scope="module", params=MODELS)
def both(request, tmp_path_factory) -> tuple[Any, Any]:
    root = tmp_path_factory.mktemp(request.param)
    step = saved(root, request.param)
    return ours(step, 3), theirs(step, root / "hf", request.param)


def test_log_likelihoods_are_those_of_transformers(both):
    """Of long and short requests, beyond the context, and after nothing; 3 in a batch here, 1 there."""
    found, expected = (lm.loglikelihood(requests(PAIRS), disable_tqdm=True) for lm in both)
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert len({round(nats, 3) for nats, _ in found}) == len(PAIRS)


def test_what_the_model_would_say_is_greedy(both):
    ours, theirs = both
    (text,) = theirs.generate_until(requests([("The cat", {"until": [], "max_gen_toks": 1})]), disable_tqdm=True)
    text = " " * ours._tokens.adds_space + text  # which decoding has removed
    pairs = [("The cat", text), ("The cat", "~"), ("The cat", text + "~")]
    found, expected = (lm.loglikelihood(requests(pairs), disable_tqdm=True) for lm in (ours, theirs))
    encoded = [len(ours.tok_encode(each)) for each in ("The cat", "The cat" + text)]
    said = encoded[1] == encoded[0] + 1  # not a piece that no text is encoded as
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected] == [said, False, False]


def test_rolling_log_likelihoods_are_those_of_transformers(both):
    found, expected = (lm.loglikelihood_rolling(requests(TEXTS), disable_tqdm=True) for lm in both)
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-6)


def test_a_text_of_imported_weights_begins_with_their_bos(tmp_path: Path):
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    step = saved(tmp_path, "llama")
    export(step, tmp_path / "hf")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=END, bos_token="!")
    fast.save_pretrained(tmp_path / "tokenizer")
    shutil.rmtree(tmp_path / "hf" / EXPORTED)  # as of weights that others trained
    import_(tmp_path / "hf", tmp_path / "imported", log=lambda _: None)
    found = restore(str(tmp_path / "imported"), "fp32", tokenizer=str(tmp_path / "tokenizer"))
    from gptlite.satellites.harness.lm import GptliteLM

    scorer = Scorer(found.model, found.runner, found.tokenizer, 3, print)
    mine = GptliteLM(SharedScorer(scorer, found.runner.mesh), found.model.spec, found.tokenizer, 32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    reference = HFLM(pretrained=model, tokenizer=fast, batch_size=1, max_length=32, device="cpu")
    assert mine.prefix_token_id == reference.prefix_token_id == tokenizer().token_to_id("!")
    sums = [each.loglikelihood_rolling(requests(TEXTS), disable_tqdm=True) for each in (mine, reference)]
    assert sums[0] == pytest.approx(sums[1], abs=1e-4)
    own = ours(step, 3)  # documents of a run of gptlite begin after EOD
    assert own.prefix_token_id == own.eot_token_id == 0
    assert own.loglikelihood_rolling(requests(TEXTS))[0] != pytest.approx(sums[0][0], abs=1e-3)


def test_generated_texts_are_those_of_transformers(both):
    found, expected = (lm.generate_until(requests(PROMPTS), disable_tqdm=True) for lm in both)
    assert found == expected
    assert all(found)


def test_the_command_runs_tasks_and_keeps_their_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from gptlite.commands.eval import run
    from gptlite.satellites.harness.tasks import results_file

    step = saved(tmp_path, "gpt2")
    arguments = [f"checkpoint={step}", f"tasks={NAMES}", f"include_path={TASKS}", "limit=5", "precision=fp32"]
    assert run(arguments) == 0
    *_, table, where, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert figures.keys() == {"offline_choice", "offline_write", "offline_rolling"}
    assert 0 <= figures["offline_choice"]["acc"] <= 1
    assert "exact_match" in table
    path = Path(where.removeprefix("results: "))
    assert path.parent == tmp_path / "ours" / "lm_eval"
    kept = json.loads(path.read_text())
    assert kept["n-samples"]["offline_choice"]["effective"] == 5
    assert kept["checkpoint"] == str(step)
    assert not results_file(step, NAMES.split(",")).exists()


def test_tasks_that_do_not_run_are_refused(tmp_path: Path):
    from gptlite.satellites.harness.tasks import Tasks, run_tasks

    (tmp_path / "lost.yaml").write_text((TASKS / "offline_choice.yaml").read_text().replace("choice.jsonl", "no.jsonl"))
    (tmp_path / "offline.py").write_text((TASKS / "offline.py").read_text())
    with pytest.raises(ConfigError, match="tasks=offline_choice: the data cannot be loaded: FileNotFoundError"):
        run_tasks(None, Tasks(("offline_choice",), folder=str(tmp_path)))


@pytest.mark.slow
def test_an_unknown_task_is_refused():
    """It reads the files of all of lm-eval's tasks."""
    from gptlite.satellites.harness.tasks import Tasks, run_tasks

    with pytest.raises(ConfigError, match=r"tasks=offline_choise is not .* did you mean offline_choice\?"):
        run_tasks(None, Tasks(("offline_choise",), folder=str(TASKS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"), [*(("llama", layout) for layout in ("tp2", "pp2", "zero3", "ddp")), ("mixed", "pp2")]
)
def test_a_layout_gives_the_numbers_of_one_process(tmp_path: Path, model: str, layout: str):
    from distributed.cells.run import run_ranks

    step = saved(tmp_path, model)
    expected = ours(step, 3)
    (found, nothing) = run_ranks(2, "harness.on_ranks:answers", str(step), f"parallelism={layout}", timeout=200)
    assert nothing is None
    pairs, texts, written = found
    one = [expected.loglikelihood(requests(PAIRS), disable_tqdm=True), expected.loglikelihood_rolling(requests(TEXTS))]
    assert [greedy for _, greedy in pairs] == [greedy for _, greedy in one[0]]
    assert [nats for nats, _ in pairs] == pytest.approx([nats for nats, _ in one[0]], abs=1e-4)
    assert texts == pytest.approx(one[1], rel=1e-6)
    assert written == expected.generate_until(requests(PROMPTS))


def normalizing() -> SentencePieceTokenizer:
    """A SentencePiece model with the defaults of its trainer: texts lose double spaces and line ends."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["The cat ran the at"] * 20),
        model_writer=model,
        vocab_size=VOCABULARY,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue())


def test_bits_per_byte_are_those_of_lm_eval_where_a_tokenizer_changes_texts(tmp_path: Path, capsys):
    """Bytes are those of the text, not of its pieces. The text is long, since only one of the two counts its first
    token, and only the other one the end of the document."""
    from gptlite.commands.eval import run

    step, _ = committed(tmp_path / "ours")(*MODELS["gpt2"], "data.sequence_length=32", tokenizer=normalizing())
    text = "  The cat   sat on the mat,\n\n\tand a dog   ran ﬁrst … after\r\n the cat.   \n" * 400
    (tmp_path / "text.txt").write_text(text, newline="")
    assert run([f"checkpoint={step}", f"data={tmp_path / 'text.txt'}", "precision=fp32"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["bits_per_byte"]
    (nats,) = ours(step, 8).loglikelihood_rolling(requests([text]), disable_tqdm=True)
    assert found == pytest.approx(-nats / math.log(2) / len(text.encode()), rel=1e-3)
    assert normalizing().token_bytes()[normalizing().encode(text)].sum() < 0.85 * len(text.encode())
