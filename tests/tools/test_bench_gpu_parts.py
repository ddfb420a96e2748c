"""The parts of tools/bench_gpu.py: the byte model by hand-made traces, the step's trace, the report's files."""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gptlite.config.schema import CONF_DIR

TOOLS = CONF_DIR.parent / "tools"


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def operand(*shape: int, stride: tuple[int, ...] | None = None, item: int = 2, **how: Any) -> Any:
    from gpu_bench.step_trace import Operand

    plain = [1]
    for size in shape[:0:-1]:
        plain.insert(0, plain[0] * size)
    return Operand(list(shape), list(stride if stride is not None else plain[: len(shape)]), item, **how)


def op(name: str, operands: list[Any], results: list[Any], **how: Any) -> Any:
    from gpu_bench.step_trace import Op

    return Op(name, "forward", operands, results, how.pop("view", False), **how)


def trace(*ops: Any) -> Any:
    from gpu_bench.step_trace import Trace

    return Trace("small", 1, 1000, 768, 64, 50257, list(ops))


def modelled(*ops: Any) -> Any:
    from gpu_bench.byte_model import model_of_trace

    return model_of_trace(trace(*ops))


def new(*shape: int, item: int = 2) -> Any:
    return operand(*shape, item=item, read=False, written=True)


def test_a_product_takes_the_larger_of_its_flops_and_its_bytes() -> None:
    large = modelled(op("aten.mm", [operand(8192, 8192), operand(8192, 8192)], [new(8192, 8192)]))
    assert large.rows[0].ns == pytest.approx(1e9 * 2 * 8192**3 / 790e12)
    thin = modelled(op("aten.mm", [operand(8192, 8), operand(8, 8192)], [new(8192, 8192)]))
    assert thin.rows[0].ns == pytest.approx(1e9 * (2 * 2 * 8192 * 8 + 2 * 8192**2) / 4.3e12)


@pytest.mark.parametrize(
    ("columns", "stride", "off"),
    [
        (50304, (50304, 1), 0),
        (50257, (50257, 1), 1),
        (50257, (50304, 1), 0),  # a view of padded rows
        (50257, (1, 64), 0),  # stored by columns
        (50257, (1, 63), 1),
    ],
)
def test_rows_off_16_bytes_are_found_by_their_stride(columns: int, stride: tuple[int, int], off: int) -> None:
    from gpu_bench.byte_model import MISALIGNED

    product = [op("aten.mm", [operand(64, columns, stride=stride), operand(columns, 768)], [new(64, 768)])]
    model = modelled(*product)
    assert model.rows[0].misaligned == off
    assert model.rows[0].group == "GEMM head"
    fp32 = [op("aten.mm", [operand(64, 50257, item=4), operand(50257, 768, item=4)], [new(64, 768, item=4)])]
    assert modelled(*fp32).rows[0].misaligned == 0
    if off:
        least = max(2 * 64 * columns * 768 / 790e12, model.rows[0].bytes / 4.3e12)
        assert model.rows[0].ns == pytest.approx(1e9 * MISALIGNED * least)


def test_bytes_are_of_what_exists_and_is_touched() -> None:
    from gpu_bench.byte_model import bytes_of

    table, ids = operand(50304, 768, item=4), operand(16, item=8)
    cases = [
        (op("aten._to_copy", [operand(10, 4, item=4)], [new(10, 4)]), 10 * 4 * 6),
        (op("aten.add", [operand(10, 4), operand(10, 4, stride=(0, 1))], [new(10, 4)]), 2 * (40 + 4 + 40)),
        (op("aten.copy_", [operand(10, written=True), operand(10)], []), 2 * 20),
        (op("aten.add_", [operand(10, written=True), operand(10)], []), 2 * 30),
        (op("aten.embedding", [table, ids], [new(16, 768, item=4)]), 2 * 16 * 768 * 4 + 16 * 8),
        (op("aten._to_copy", [operand(16, item=8, host=True)], [new(16, item=8)]), 16 * 8),
        (
            op("gptlite.add_token_rows_", [operand(50304, 768, item=4, written=True), operand(16, 768), ids, ids], []),
            16 * 768 * 2 + 2 * 16 * 768 * 4 + 2 * 16 * 8,
        ),
        (op("aten.addmm", [*[operand(4, 4)] * 3, operand(4, 4, read=False, written=True)], []), 4 * 32),
    ]
    for each, expected in cases:
        assert bytes_of(each) == expected, each.name


def test_launches_of_lists_views_and_host_tensors() -> None:
    model = modelled(
        op("aten.view", [operand(4)], [], view=True),
        op("aten.ones", [], [operand(4, host=True)]),
        op("gptlite.norm", [operand(4) for _ in range(129)], [new(1)]),
        op("gptlite.adamw_", [operand(4, written=True) for _ in range(5 * 65)], []),
        op("gptlite.layer_norm_backward", [operand(4, 8)], [new(4, 8)]),
        op("aten.add", [operand(4), operand(4)], [new(4)]),
    )
    launches = {row.op: row.launches for row in model.rows}
    assert launches == {"gptlite.norm": 3, "gptlite.adamw_": 4, "gptlite.layer_norm_backward": 2, "aten.add": 1}
    assert model.undeclared == []
    assert modelled(op("gptlite.novel", [operand(4)], [new(4)])).undeclared == ["gptlite.novel"]


def test_attention_is_at_its_published_rates() -> None:
    """12 layers of 12 heads of 64 over 2048 positions: 394 and 617 ns per token."""
    from gpu_bench.byte_model import model_of_trace

    q = operand(1, 12, 2048, 64)
    there = op("aten._scaled_dot_product_flash_attention", [q, q, q], [new(1, 12, 2048, 64)], causal=True)
    back = op("aten._scaled_dot_product_flash_attention_backward", [q, q, q, q], [new(1, 12, 2048, 64)], causal=True)
    ours = trace(*[there, back] * 12)
    ours.tokens = 2048
    model = model_of_trace(ours)
    assert model.by_class()["attention"] == pytest.approx(394, rel=0.01)
    assert model.by_class(slower=True)["attention"] == pytest.approx(617, rel=0.01)


def test_no_rate_is_better_than_the_ceilings() -> None:
    from gpu_bench import byte_model as rules
    from gpu_bench.pictures import COLOURS

    assert rules.COPY <= 4.3e12
    assert rules.PRODUCT <= 798e12
    assert rules.MISALIGNED >= 2.0
    assert max(rules.NORM_NARROW, rules.NORM_WIDE, rules.NORM_BACKWARD, rules.LOSS) <= 1.0
    assert set(rules.CLASSES) == set(COLOURS)


def test_the_step_is_traced_whole() -> None:
    from gpu_bench.byte_model import model_of_trace
    from gpu_bench.step_trace import trace_step
    from real_step import model_of

    from gptlite.models.gpt.flops import flops_per_token

    found = trace_step("tiny", 2)
    config, model = model_of("tiny"), model_of_trace(found)
    assert {each.phase for each in found.ops} == {"forward", "backward", "update"}
    assert model.undeclared == []
    # Products as MFU counts them, the table's padding included or not; attention's backward pass makes its scores anew.
    expected = flops_per_token(config, config.sequence_length) * found.tokens
    attention = 6 * config.num_layers * config.d_model * config.sequence_length * found.tokens
    counted = sum(row.flops for row in model.rows)
    assert expected + attention / 6 <= counted * 1.0001
    assert counted <= expected * (config.padded_vocab_size / (config.vocab_size or 1)) + attention / 6
    kinds = {row.op for row in model.rows}
    assert {"aten._scaled_dot_product_flash_attention_backward", "gptlite.adamw_", "gptlite.cross_entropy_"} <= kinds
    assert not any(name.startswith("gptlite.attention") for name in kinds)  # a CPU's


def test_a_step_has_no_pass_that_a_kernel_takes_along() -> None:
    """No sum for a bias and no second gradient of the tied table; of casts those of the MLPs' first biases and of the
    learned positions, there and back."""
    from gpu_bench.byte_model import model_of_trace
    from gpu_bench.step_trace import trace_step
    from real_step import model_of

    layers, model = model_of("tiny").num_layers, model_of_trace(trace_step("tiny", 2))
    calls: Counter[tuple[str, str]] = Counter()
    for row in model.rows:
        calls[row.op, row.phase] += row.calls
    assert model.by_class()["bias sums"] == 0
    assert calls["gptlite.join_heads", "backward"] == layers
    assert calls["gptlite.add_token_rows_", "backward"] == 1
    assert calls["aten._to_copy", "backward"] == layers + 1
    assert calls["aten._to_copy", "forward"] == 1
    gone = {"aten.stack", "aten.cat", "aten.embedding_dense_backward"}
    assert not [key for key in calls if key[0] in gone and key[1] == "backward"]


def test_products_in_fp8_have_a_rate_of_their_own_and_rows_of_16_elements() -> None:
    def scaled(columns: int) -> Any:
        operands = [operand(8192, columns, item=1), operand(columns, 8192, stride=(1, columns), item=1), operand()]
        return modelled(op("aten._scaled_mm", [*operands, operand()], [new(8192, 8192)])).rows[0]

    assert scaled(8192).ns == pytest.approx(1e9 * 2 * 8192**3 / 1388e12)
    assert [scaled(columns).misaligned for columns in (8192, 8200)] == [0, 1]


def test_a_gradient_in_e5m2_is_written_once_and_the_logits_are_read() -> None:
    """The trace of a head in fp8: three products in fp8, 3 bytes per logit for the loss, and 2 for the transpose."""
    from gpu_bench.byte_model import model_of_trace
    from gpu_bench.step_trace import trace_step
    from real_step import model_of

    plain, model = (model_of_trace(trace_step("tiny", 2, precision)) for precision in ("bf16", "bf16+head"))
    tokens, config = model.trace.tokens, model_of("tiny")
    columns, vocabulary = config.padded_vocab_size, config.vocab_size or 0
    products = [row for row in model.rows if row.group == "GEMM head"]
    assert {(row.op, row.calls) for row in products} == {("aten._scaled_mm", 1)}
    assert sum(row.flops for row in model.rows) == sum(row.flops for row in plain.rows)
    (loss,) = (row for row in model.rows if row.op == "gptlite.cross_entropy_")
    assert loss.bytes == 3 * tokens * vocabulary + (8 + 4) * tokens
    (transpose,) = (row for row in model.rows if row.op == "aten.clone" and row.shapes == f"{columns}x{tokens}")
    assert transpose.bytes == 2 * tokens * columns


def test_a_blocking_read_is_counted_where_it_is() -> None:
    import torch
    from gpu_bench.step_trace import _Dispatch, _Functions

    found = trace()
    tensor = torch.empty(2, device="meta")
    with _Functions(found), _Dispatch(found):
        assert tensor.sum().item() == 1.0
        assert tensor.tolist() == [1.0, 1.0]
        assert bool(tensor[0] > 0)
        tensor.to("cpu")
        torch.empty(2).copy_(tensor, non_blocking=True)
    kinds = [each.partition(" ")[0] for each in found.blocking_reads]
    assert kinds == ["item", "tolist", "__bool__", "_to_copy"]
    assert [each.partition(" ")[0] for each in found.copies_to_host] == ["copy_"]


def test_the_report_is_written_as_it_grows(tmp_path: Path) -> None:
    from gpu_bench.report import Part, assemble

    part = Part(tmp_path, "steps", 1, log=lambda line: None)
    part.table(("a", "b"), rows := [("x", "1.5"), ("y|z", "10")])
    assert "| x   | 1.5 |" in (tmp_path / "steps.md").read_text()
    rows[0] = ("x", "2.5")
    part.put("value", 3)
    part.failed("it broke")
    assert json.loads((tmp_path / "steps.json").read_text())["value"] == 3
    report = assemble(tmp_path, "on nothing").read_text()
    assert "- steps: it broke" in report
    assert "2.5" in report
    assert "1.5" not in report
    assert Part(tmp_path, "model", 0).over


def test_a_part_that_hangs_is_ended_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench_gpu import Arguments
    from gpu_bench import parts

    monkeypatch.setattr(parts, "GRACE", 0.3)
    started = time.monotonic()
    parts._in_a_process(Arguments(device="cpu", size="tiny"), "ceilings", tmp_path, 0.0)
    assert time.monotonic() - started < 10
    data = json.loads((tmp_path / "ceilings.json").read_text())
    assert data["failures"] == ["the part was ended after 0 s"]


def test_shares_of_the_parts_are_at_most_twenty_minutes() -> None:
    from gpu_bench.parts import BUILD, GRACE, SESSION, SHARES
    from gpu_bench.report import TITLES

    assert set(SHARES) | set(SESSION) == set(TITLES)
    assert sum(SHARES.values()) + BUILD <= 20
    assert sum(SESSION.values()) + BUILD <= 15
    assert GRACE < 30


def test_packages_come_from_wheels_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    from gpu_bench import environment

    monkeypatch.setattr(environment, "CARRIED", {"gptlite_no_such_package": "no-such-package==1"})
    monkeypatch.setattr(sys, "path", list(sys.path))
    refusal = environment.prepare(tmp_path, ["part=model"])
    assert "missing: no-such-package==1" in refusal
    assert "part=wheels" in refusal
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "no_such-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gptlite_no_such_package/__init__.py", "")
    assert environment.prepare(tmp_path, ["part=model"]) == ""
    assert any("gptlite-wheels-" in path for path in environment.child_environment()["PYTHONPATH"].split(os.pathsep))


def test_kernels_are_classified_by_the_op_that_launched_them() -> None:
    from gpu_bench.profiled import Slice, group_of

    ours = trace()
    cases = [
        (Slice("k", "aten::mm", ((1000, 768), (768, 2304)), 1.0), "GEMM block"),
        (Slice("k", "aten::mm", ((1000, 768), (768, 50304)), 1.0), "GEMM head"),
        (Slice("k", "gptlite::cross_entropy_", ((1000, 50257),), 1.0), "loss"),
        (Slice("k", "gptlite::norm", (), 1.0), "optimizer"),
        (Slice("k", "gptlite::residual_norm", ((1, 1000, 768),), 1.0), "norm + residual"),
        (Slice("k", "aten::_flash_attention_forward", ((1, 1000, 12, 64),), 1.0), "attention"),
        (Slice("Memcpy HtoD", "", (), 1.0), "copy/cast"),
        (Slice("nvjet_tst_128x128", "", (), 1.0), "GEMM block"),
    ]
    assert [group_of(each, ours) for each, _ in cases] == [group for _, group in cases]


def test_a_kernels_goal_depends_on_its_width() -> None:
    from gpu_bench.kernel_rows import goal_of

    assert goal_of("layer_norm", "forward", 768) == 88
    assert goal_of("layer_norm", "forward", 2048) == 97
    assert goal_of("cross_entropy_", "both", 50304) == 98
    assert goal_of("bias_activation gelu_tanh", "forward", 768) is None


def result(name: str, size: str, micro_batch: int, rate: float) -> dict[str, Any]:
    """What a contender's process prints."""
    seconds = {"seconds": 1 / rate, "lowest": 0.9 / rate, "highest": 1.1 / rate, "first": 3.0}
    return {
        "name": name,
        "size": size,
        "micro_batch": micro_batch,
        "tokens_per_second": rate,
        "mfu": None,
        "memory": 0,
    } | seconds


def test_ratios_are_of_one_model_and_micro_batch() -> None:
    from gpu_bench.compare import HEAD, table_rows

    base, theirs = "reference compiled", "transformers' Llama compiled"
    results = [
        result("kernels", "xl", 4, 50.0),
        result("kernels", "small", 16, 300.0),
        result(base, "small", 16, 200.0),
    ]
    results += [
        result(base, "small", 4, 400.0),
        {"name": "kernels", "size": "small", "micro_batch": 4, "error": "gone"},
    ]
    results += [result("Llama kernels", "small", 16, 90.0), result(theirs, "small", 16, 60.0)]
    rows = table_rows(results, (base, theirs))
    assert [(*row[:3], *row[-2:]) for row in rows] == [
        ("small", "4", base, "1.00", ""),
        ("small", "4", "kernels", "", ""),
        ("small", "16", "kernels", "1.50", ""),
        ("small", "16", base, "1.00", ""),
        ("small", "16", "Llama kernels", "", "1.50"),
        ("small", "16", theirs, "", "1.00"),
        ("xl", "4", "kernels", "", ""),
    ]
    assert {len(row) for row in rows} == {len(HEAD) + 2}
    assert rows[1][3] == "gone"


def test_what_does_not_fit_or_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_bench import compare
    from gpu_bench.arguments import Arguments
    from gpu_bench.report import Part

    lines: list[str] = []
    part = Part(tmp_path, "compare", 10, lines.append)

    def measured(part: Part, who: str, size: str, options: Arguments) -> Any:
        part.seconds -= 300  # of ten minutes, for two cells
        for micro_batch in (4, 16):
            yield {
                key: value for key, value in result(who, size, micro_batch, 10.0).items() if key not in ("name", "size")
            }

    monkeypatch.setattr(compare, "measured", measured)
    compare.run(part, Arguments(part="compare"))
    text = (tmp_path / "compare.md").read_text()
    assert "Not measured: nanoGPT compiled, small: peer=NANOGPT is not given." in text
    assert "Not reached in time: kernels compiled, small; kernels, xl;" in text
    assert text.count("| small") == 4
    assert "(compare.png)" in text
    assert len(json.loads((tmp_path / "compare.json").read_text())["results"]) == 4


def test_a_contender_that_hangs_or_fails_is_ended_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_bench import compare
    from gpu_bench.arguments import Arguments
    from gpu_bench.report import Part

    part, options = Part(tmp_path, "compare", 10, lambda line: None), Arguments(part="compare")
    hangs = "import time; print('{\"micro_batch\": 4}', flush=True); time.sleep(60)"
    monkeypatch.setattr(compare, "LONGEST", 2.0)
    monkeypatch.setattr(compare, "program", lambda asked: [sys.executable, "-c", hangs])
    started = time.monotonic()
    assert list(compare.measured(part, "kernels", "small", options)) == [{"micro_batch": 4}]
    assert time.monotonic() - started < 40
    assert "Ended after 2 s: kernels, small, with 1 of 2 results." in (tmp_path / "compare.md").read_text()
    monkeypatch.setattr(compare, "LONGEST", 60.0)
    monkeypatch.setattr(compare, "program", lambda asked: [sys.executable, "-c", "raise OSError('planted')"])
    assert list(compare.measured(part, "kernels", "small", options)) == []
    assert part.failures == ["kernels, small: exit code 1; OSError: planted"]


def test_every_contender_of_a_part_is_known_and_the_session_fits_in_a_loan() -> None:
    from gpu_bench.compare import RACES
    from gpu_bench.contenders import CONTENDERS, shape_of
    from gpu_bench.parts import BUILD, SESSION

    from gptlite.models.gpt.flops import layer_flops

    for race in RACES.values():
        named = [*(who for who, _ in race.cells), *race.tiny, *race.against]
        assert set(named) <= set(CONTENDERS)
        assert len(set(race.cells)) == len(race.cells)
        assert {race.against[0]} <= {who for who, _ in race.cells}
    assert BUILD + sum(SESSION.values()) <= 14
    for size in ("small", "medium", "xl"):
        sizes = [layer_flops(shape_of(size, llama)) for llama in (False, True)]
        assert sizes[1] == pytest.approx(sizes[0], rel=0.03)
