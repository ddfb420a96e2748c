"""A mixture of experts made of a dense checkpoint computes what the dense model does."""

from pathlib import Path

import pytest
import torch
from checkpoint.huggingface_models import VOCABULARY, committed, restored

from gptlite.errors import ConfigError
from gptlite.satellites.checkpoint_tool.upcycle import Options, run


@pytest.mark.parametrize("more", [[], ["model.mlp=swiglu", "model.tied_embeddings=false"]], ids=str)
def test_experts_start_as_copies_of_the_dense_mlp(tmp_path: Path, capsys, more):
    step, dense = committed(tmp_path)("model.bias=false", *more)
    assert run([str(step), str(tmp_path / "moe")], Options(experts=4, top_k=3)) == 0
    told = capsys.readouterr()
    folder = Path(told.out.splitlines()[-1])
    assert "run.dir=" not in told.out + told.err  # of the dense run, whose folder training would go on in
    model, tokens = restored(folder), torch.randint(VOCABULARY, (2, 16))
    experts = model.layers["1"].mlp.experts  # type: ignore[union-attr]
    assert experts.up.shape[0] == model.config.moe.experts == 4
    assert all(torch.equal(each, dense.layers["1"].mlp.up.weight) for each in experts.up)  # type: ignore[union-attr]
    assert len(model.layers["1"].mlp.router.weight.unique()) > 1  # type: ignore[union-attr]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, None), dense.eval()(tokens, None), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_upcycled_is_refused_and_nothing_is_written(tmp_path: Path):
    new = tmp_path / "moe"
    step, _ = committed(tmp_path / "a")()
    with pytest.raises(ConfigError, match=r"model\.bias=true: experts have no biases"):
        run([str(step), str(new)], Options())
    step, _ = committed(tmp_path / "b")("model.bias=false")
    with pytest.raises(ConfigError, match=r"model\.moe\.top_k=3 is above model\.moe\.experts=2"):
        run([str(step), str(new)], Options(experts=2, top_k=3))
    assert not new.exists()
    assert run([str(step), str(new)], Options(experts=2)) == 0
    with pytest.raises(ConfigError, match="exists; nothing is overwritten"):
        run([str(step), str(new)], Options())
    with pytest.raises(ConfigError, match=r"model\.moe\.experts=2: the model already has experts"):
        run([str(new), str(tmp_path / "again")], Options())
