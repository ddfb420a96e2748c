import math
import random
import sys

import pytest

from gptlite.errors import ConfigError
from gptlite.metrics.jsonl import JsonlSink
from gptlite.satellites.plots.curves import _summary, plot_curves, smooth


def write_run(path, steps, loss):
    sink = JsonlSink(path)
    for step in steps:
        sink.write({"step": step, "loss": loss(step), "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 1e4})
        if step % 20 == 0:
            sink.write({"step": step, "val_loss": loss(step) + 0.1, "val_bits_per_byte": None})
    sink.close()


def pixels(png):
    image = pytest.importorskip("matplotlib.image").imread(png)
    return (image[..., :3] * 255).round().astype(int)


def count(image, color):
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return int((abs(image - [red, green, blue]).sum(-1) < 12).sum())


@pytest.mark.parametrize("steps", [[1], range(1, 41), range(10, 3000, 10)])
def test_a_run_of_any_length_becomes_a_picture_with_both_curves(tmp_path, steps):
    from gptlite.satellites.plots.style import TRAIN, VALIDATION

    write_run(tmp_path / "metrics.jsonl", steps, lambda step: 2 + 6 / step)
    out = plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    image = pixels(out)
    assert image.shape == (990, 1650, 3)
    assert count(image, TRAIN) > 50
    assert (count(image, VALIDATION) > 50) == (max(steps) >= 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


@pytest.mark.parametrize(("steps", "marker"), [([1], "."), ([10, 20, 30], "."), (range(1, 41), "")])
def test_the_points_of_a_short_run_are_marked(tmp_path, monkeypatch, steps, marker):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    write_run(tmp_path / "metrics.jsonl", steps, lambda step: 3.0)
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert drawn[0].axes[1].lines[0].get_marker() in (marker, marker or "None")


def test_holes_from_a_diverged_loss_do_not_stop_the_picture(tmp_path):
    write_run(tmp_path / "metrics.jsonl", range(1, 60), lambda step: math.nan if step > 30 else 3.0)
    assert plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png").stat().st_size > 10_000


def test_nothing_to_plot_is_an_error_and_the_old_picture_stays(tmp_path):
    (tmp_path / "curves.png").write_bytes(b"old")
    for text in (None, '{"step": 1, "loss": null}\n'):
        if text:
            (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(ConfigError, match="no rows with a loss"):
            plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes() == b"old"


def test_a_name_is_text_whatever_it_has(tmp_path):
    folder = tmp_path / "a$\\x$\x1b\nb"
    folder.mkdir()
    write_run(folder / "metrics.jsonl", range(1, 5), lambda step: 3.0)
    assert plot_curves(folder / "metrics.jsonl", folder / "curves.png").stat().st_size


def test_smoothing_keeps_a_constant_and_has_no_lag():
    assert smooth([3.0] * 50, 5) == pytest.approx([3.0] * 50)
    line = [float(i) for i in range(100)]
    assert smooth(line, 4)[20:80] == pytest.approx(line[20:80])
    assert smooth([1.0, 2.0], 100) == pytest.approx([1.5, 1.5], rel=1e-3)
    assert smooth([1.0, 5.0], 0.1) == [1.0, 5.0]
    noise = [random.Random(i).gauss(0, 1) for i in range(400)]
    assert max(map(abs, smooth(noise, 10)[30:-30])) < 1


def test_matplotlib_keeps_its_settings_and_pyplot_stays_out(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now raises
    write_run(tmp_path / "metrics.jsonl", range(1, 30), lambda step: 3.0)
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert dict(matplotlib.rcParams) == before


def test_the_seconds_of_training_weigh_a_row_by_its_steps() -> None:
    """A first row of one slow step, and two of ten: 30 s, where the rows' mean for all steps is 84 s."""
    rows = [{"step": step, "loss": 1.0, "step_seconds": each} for step, each in ((1, 10.0), (11, 1.0), (21, 1.0))]
    assert _summary(rows, "token") == "21 steps   ·   30s of training"
