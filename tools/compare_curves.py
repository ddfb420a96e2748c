"""Train the default run and peers of equal size for the same time on the same text; plot bits per byte over time.

python tools/compare_curves.py [peers=nanogpt,llama] [nanogpt=CLONE] [rates=1e-3,3e-3] [dropout=0.0] [seeds=1234,1]
    [minutes=null] [output=outputs/curves]

First, experiment=gpt-lite-2020 and the default run of train.py are trained with each seed. Then each peer is trained
for `minutes` with each peak learning rate in `rates`; null means the time of gpt-lite-2020 with the first seed.

Peers are nanoGPT's model (with `dropout`) and optimizer (AdamW with beta2 0.99), and transformers' Llama with AdamW.
Both use bf16 autocast, batches from random positions, and the vocabulary, width, depth and batch size of gpt-lite-2020.
The cosine schedule depends on elapsed time, and ends with the run at a tenth of the peak rate. Times include ten
evaluations per run on all held-out plays. `output` is the folder of curves.json and curves.png. Runs that are already
in curves.json are not repeated.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nanogpt import Size, check_clone, nanogpt_model
from timing import check_names

from gptlite.config.command_line import run_tool
from gptlite.files import replacing, write_whole
from gptlite.metrics.jsonl import read_rows

FORMER, OURS = "gptlite, GPT-lite 2020", "gptlite, default"
PEERS = {"nanogpt": "nanoGPT", "llama": "transformers Llama"}
COLORS = {FORMER: "#8fb0e0", OURS: "#1f5fbf", "nanoGPT": "#d9822b"}
SIZE = Size(vocab_size=4096, d_model=256, num_heads=8, num_layers=4, sequence_length=256, batch_size=16)
EVALUATIONS, WARMUP = 10, 0.08  # evaluations per run, and warm-up as a fraction of the time
Curve = list[tuple[float, float]]  # minutes, bits per byte


@dataclass
class Arguments:
    """Command-line arguments."""

    peers: str = "nanogpt,llama"
    nanogpt: str = ""
    rates: str = "1e-3,3e-3"
    dropout: float = 0.0
    seeds: str = "1234,1"
    minutes: float | None = None
    output: str = "outputs/curves"


def main(arguments: Arguments) -> None:
    """Train the runs missing in curves.json; print and draw all results. Raises ConfigError for invalid arguments."""
    peers = arguments.peers.split(",")
    check_names("peers", arguments.peers, PEERS)
    if "nanogpt" in peers:
        check_clone(arguments.nanogpt, "nanogpt")
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    file = output / "curves.json"
    curves: dict[str, Curve] = json.loads(file.read_text()) if file.exists() else {}

    def done(name: str, train: Callable[[], Curve]) -> Curve:
        if name not in curves:
            print(f"{name} ...", flush=True)
            curves[name] = train()
            write_whole(file, json.dumps(curves, indent=1))
        minutes, bits = curves[name][-1]
        print(f"{name:44s} {minutes:6.2f} min  {bits:.4f} bits per byte", flush=True)
        return curves[name]

    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for seed in seeds:
        for name, words in ((FORMER, ["experiment=gpt-lite-2020"]), (OURS, [])):
            folder = folder_of(output, name, seed)
            done(f"{name}, seed {seed}", lambda folder=folder, words=words, seed=seed: our_run(folder, seed, words))
    minutes = arguments.minutes or curves[f"{FORMER}, seed {seeds[0]}"][-1][0]
    per_nat = bits_per_nat(folder_of(output, FORMER, seeds[0]))
    for peer in peers:
        for rate in map(float, arguments.rates.split(",")):
            name = f"{PEERS[peer]}, rate {rate:g}, dropout {arguments.dropout:g}"
            done(name, lambda peer=peer, rate=rate: peer_run(peer, arguments, rate, 60 * minutes, per_nat))
    draw(curves, output / "curves.png")
    print(f"picture: {output / 'curves.png'}")


def folder_of(output: Path, name: str, seed: int) -> Path:
    """Return the folder of a gptlite run."""
    return output / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"


def our_run(folder: Path, seed: int, overrides: list[str]) -> Curve:
    """Run train.py and return its curve. Times count from the start of the command."""
    command = [sys.executable, str(Path(__file__).parents[1] / "train.py"), f"run.dir={folder}", f"seed={seed}"]
    start = time.time()
    subprocess.run([*command, "trainer.sample_tokens=0", *overrides], check=True, stdout=subprocess.DEVNULL)
    curve = []
    for row in read_rows(folder / "metrics.jsonl"):
        if "val_bits_per_byte" in row:
            minutes = (datetime.fromisoformat(row["time"]).timestamp() - start) / 60
            curve.append((round(minutes, 4), row["val_bits_per_byte"]))
    return curve


def bits_per_nat(folder: Path) -> float:
    """Return the factor from nats per token to bits per byte, on the held-out text of a run."""
    row = [row for row in read_rows(folder / "metrics.jsonl") if "val_bits_per_byte" in row][-1]
    return row["val_bits_per_byte"] / row["val_loss"]


def peer_run(peer: str, arguments: Arguments, rate: float, seconds: float, per_nat: float) -> Curve:
    """Train a peer for a number of seconds, including evaluations, and return its curve."""
    import torch

    from gptlite.config import load
    from gptlite.data.build import prepare

    data = prepare(load(["experiment=gpt-lite-2020"]).data, seed=0).sets[0]
    torch.manual_seed(1337)
    model, optimizer, losses = build(peer, arguments, rate)
    start, evaluated, curve = time.perf_counter(), 0, list[tuple[float, float]]()
    generator = torch.Generator().manual_seed(1337)  # draws the batches
    train, length = torch.from_numpy(data.train.astype("int64")), SIZE.sequence_length
    while (elapsed := time.perf_counter() - start) < seconds:
        if elapsed >= seconds * evaluated / EVALUATIONS and evaluated:
            curve.append((round(elapsed / 60, 4), evaluate(model, losses, data.validation) * per_nat))
        evaluated = max(evaluated, int(elapsed / seconds * EVALUATIONS) + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor(elapsed / seconds)
        places = torch.randint(len(train) - length, (SIZE.batch_size,), generator=generator)
        rows = torch.stack([train[place : place + length + 1] for place in places.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            loss = losses(model, rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    minutes = (time.perf_counter() - start) / 60
    return [*curve, (round(minutes, 4), evaluate(model, losses, data.validation) * per_nat)]


def factor(progress: float) -> float:
    """Return the learning rate divided by its peak: a linear warm-up, then a cosine to 0.1. `progress`: 0 to 1."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def evaluate(model: Any, losses: Callable[..., Any], tokens: Any) -> float:
    """Return the mean loss in nats over all held-out targets. The last sequence may be shorter."""
    import torch

    length, total, count = SIZE.sequence_length, 0.0, 0
    held_out = torch.from_numpy(tokens.astype("int64"))
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for start in range(0, len(held_out) - 1, length * SIZE.batch_size):
            piece = held_out[start : start + length * SIZE.batch_size + 1]
            whole = (len(piece) - 1) // length * length
            for x, y in ((piece[:whole], piece[1 : whole + 1]), (piece[whole:-1], piece[whole + 1 :])):
                if len(x):
                    width = min(length, len(x))
                    total += losses(model, x.view(-1, width), y.view(-1, width)).item() * len(x)
                    count += len(x)
    model.train()
    return total / count


def build(peer: str, arguments: Arguments, rate: float) -> tuple[Any, Any, Callable[..., Any]]:
    """Return a peer's model, its optimizer, and a function (model, tokens, targets) that returns the mean loss."""
    import torch

    if peer == "nanogpt":
        model = nanogpt_model(arguments.nanogpt, SIZE, dropout=arguments.dropout)
        return model, model.configure_optimizers(0.1, rate, (0.9, 0.99), "cpu"), lambda model, x, y: model(x, y)[1]
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"hidden_size": SIZE.d_model, "num_hidden_layers": SIZE.num_layers}
    shape |= {"num_attention_heads": SIZE.num_heads, "intermediate_size": -(-8 * SIZE.d_model // 192) * 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=SIZE.vocab_size, tie_word_embeddings=True, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def losses(model: Any, x: Any, y: Any) -> Any:
        logits = model(input_ids=x, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    return model, optimizer, losses


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Draw one curve per program: its run with the lowest final bits per byte."""
    import matplotlib
    from matplotlib.figure import Figure

    from gptlite.satellites.plots.style import STYLE

    best: dict[str, Curve] = {}
    for name, curve in curves.items():
        program = name.rpartition(", seed")[0] or name.partition(", rate")[0]
        if program not in best or curve[-1][1] < best[program][-1][1]:
            best[program] = curve
    with matplotlib.rc_context(STYLE), replacing(path) as file:
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.subplots()
        ends = [curve[-1][1] for curve in best.values()]
        low, high, most = min(ends) - 0.05, max(ends) + 0.6, max(curve[-1][0] for curve in best.values())
        place = low
        for program, curve in sorted(best.items(), key=lambda each: each[1][-1][1]):
            color, (end, bits) = COLORS.get(program, "#8a5fb0"), curve[-1]
            axes.plot(*zip(*curve, strict=True), color=color, marker="o", markersize=4, linewidth=2)
            place = max(bits, place + 0.05 * (high - low))  # labels of curves with similar ends do not overlap
            weight = "bold" if program == OURS else "normal"
            axes.text(end + 0.02 * most, place, f"{program}  {bits:.3f}", color=color, va="center", fontweight=weight)
        axes.set(xlabel="minutes", ylabel="bits per byte, held-out plays", xlim=(0, 1.42 * most), ylim=(low, high))
        figure.savefig(file, dpi=150, format="png")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
