"""`data=image_folder`: what is found and held out, how an image becomes a tensor, and wrong folders in one line."""

import re
import sys
from dataclasses import replace

import models.resnet  # noqa: F401  # registers the model
import numpy as np
import pytest
import torch
from PIL import Image
from run_files import read_metrics, without_plots

from gptlite.config import load
from gptlite.data.build import build_loader, open_data
from gptlite.errors import ConfigError
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import build_mesh
from gptlite.satellites.images.config import ImageFolderConfig
from gptlite.satellites.images.folder import open_image_folder
from gptlite.satellites.images.tensors import ToTensor, held_out
from gptlite.satellites.samples.dataset import open_samples
from gptlite.start.pretrain import pretrain

MODES = {"RGB": 3, "RGBA": 4, "L": 1, "LA": 2}


def write(folder, name: str, count: int = 6, mode: str = "RGB", size=(20, 14), value: int | None = None) -> None:
    """Write images of one class: noise, or one value."""
    draw = np.random.default_rng(len(name))
    (folder / name).mkdir(parents=True)
    for number in range(count):
        shape = (size[1], size[0], MODES[mode])
        pixels = draw.integers(256, size=shape) if value is None else np.full(shape, value)
        Image.fromarray(pixels.astype(np.uint8).squeeze(), mode).save(folder / name / f"{number}.png")


def config_for(path, **settings) -> ImageFolderConfig:
    return ImageFolderConfig(path=str(path), **{"size": 8, "mean": [0.0] * 3, "std": [1.0] * 3} | settings)


def test_the_folders_are_the_classes(tmp_path):
    for part, count in (("train", 5), ("test", 2)):
        write(tmp_path / part, "dog", count)
        write(tmp_path / part, "cat", count)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    sets = open_samples(config_for(tmp_path))
    assert sets.train.classes == ["cat", "dog"]
    assert (len(sets.train), len(sets.validation["image_folder"])) == (10, 4)
    assert sets.describe() == "image_folder: 10 training and 4 held-out samples, 2 classes"
    two = replace(sets, validation={"a": sets.train, "b": sets.validation["image_folder"]})
    assert "10 training and 14 held-out samples" in two.describe()
    image, label = sets.train[5]
    assert (image.shape, image.dtype, label) == ((3, 8, 8), torch.float32, 1)


def test_without_a_validation_folder_files_are_held_out_by_hash(tmp_path):
    write(tmp_path, "a", 30)
    write(tmp_path, "b", 30)
    training, held = open_image_folder(config_for(tmp_path, validation_fraction=0.25))
    assert sorted(training.files + held.files) == sorted(f"{name}/{n}.png" for name in "ab" for n in range(30))
    assert 5 <= len(held) <= 25
    assert all(held_out(file, 0.25) for file in held.files)
    write(tmp_path, "c", 1)
    again, _ = open_image_folder(config_for(tmp_path, validation_fraction=0.25))
    assert set(training.files) <= set(again.files)
    assert again.fingerprint != training.fingerprint


@pytest.mark.parametrize("mode", MODES)
def test_images_of_every_mode_are_rgb(tmp_path, mode):
    write(tmp_path, "a", 9, mode, value=51)
    training, _ = open_image_folder(config_for(tmp_path, validation_fraction=0.5))
    image, _ = training[0]
    torch.testing.assert_close(image, torch.full((3, 8, 8), 0.2))


def test_16_bit_gray_is_scaled_and_means_are_taken_off():
    image = Image.fromarray(np.full((10, 12), 257 * 51, dtype=np.uint16))
    convert = ToTensor.of(ImageFolderConfig(size=4, mean=[0.1, 0.2, 0.3], std=[0.5, 1.0, 2.0]), augment=False)
    channels = convert(image)[:, 0, 0]
    torch.testing.assert_close(channels, torch.tensor([0.2, 0.0, -0.05]), atol=1e-6, rtol=0)


def test_the_center_is_cut_out_and_augmentation_moves_it():
    pixels = np.zeros((16, 32, 3), dtype=np.uint8)
    pixels[:, 16:] = 255  # black to the left, white to the right
    config = config_for("unused", resize=16)
    image = ToTensor.of(config, augment=False)(Image.fromarray(pixels))
    assert image[0, :, :4].max() == 0
    assert image[0, :, 4:].min() == 1
    convert, seen = ToTensor.of(config, augment=True), []
    torch.manual_seed(0)
    for _ in range(20):
        seen.append(convert(Image.fromarray(pixels)))
    assert any(one[0, 0, 0] > one[0, 0, -1] for one in seen)  # flipped
    assert len({float(one.mean()) for one in seen}) > 3
    torch.manual_seed(0)
    assert torch.equal(convert(Image.fromarray(pixels)), seen[0])
    assert ToTensor.of(config_for("unused", augment=False), augment=True).augment is False


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"size": 0}, "data.size=0 must be at least 1"),
        ({"resize": 4}, "data.resize=4 must be at least data.size=8"),
        ({"mean": [0.5]}, "data.mean=[0.5] must be three numbers"),
        ({"std": [1.0, 0.0, 1.0]}, "data.std=[1.0, 0.0, 1.0] must be three numbers above 0"),
        ({"validation_fraction": 1.0}, "data.validation_fraction=1.0 must be above 0 and below 1"),
        ({"validation_fraction": 1e-9}, "none of 12 samples is held out; give another fraction"),
    ],
)
def test_wrong_settings_are_one_line(tmp_path, setting, said):
    write(tmp_path, "a")
    write(tmp_path, "b")
    with pytest.raises(ConfigError, match=re.escape(said)):
        open_samples(config_for(tmp_path, **setting))


def test_wrong_folders_are_one_line(tmp_path):
    def refused(said: str, **settings) -> None:
        with pytest.raises(ConfigError, match=re.escape(said)) as error:
            open_samples(config_for(tmp_path / "images", **settings))
        assert "\n" not in str(error.value)

    refused("images does not exist; give a folder with one folder of images per class")
    (tmp_path / "images").mkdir()
    refused("images has no classes; put each class's images in a folder, e.g. ")
    (tmp_path / "images" / "a").mkdir()
    refused("images/a has no images (.jpg, ")
    write(tmp_path / "images", "test/b")
    refused("images has test/ but no train/")
    write(tmp_path / "images", "train/a")
    refused("test/b: the training data has no class b")


@pytest.mark.parametrize("workers", [0, 1])
def test_one_unreadable_image_is_named(tmp_path, workers):
    write(tmp_path / "train", "a", 8)
    write(tmp_path / "val", "a", 2)
    whole = (tmp_path / "train" / "a" / "5.png").read_bytes()
    (tmp_path / "train" / "a" / "5.png").write_bytes(whole[: len(whole) // 2])
    words = ["data=image_folder", f"data.path={tmp_path}", "data.size=8", f"data.workers={workers}", "run.name=x"]
    config = load(["model=resnet18", "data.global_batch_size=4", "data.micro_batch_size=4", *words])
    mesh = build_mesh(ParallelismConfig())
    loader = build_loader(config.data, open_data(config.data, config.seed, print, mesh), mesh, config.seed)
    with pytest.raises(ConfigError, match=r"data=image_folder: .*/5\.png cannot be read as an image") as refused:
        _ = [loader.batch(4 * step, 0) for step in range(2)]
    assert "\n" not in str(refused.value)
    loader.close()


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        ConfigError, match=re.escape("the package pillow is not installed; run pip install 'gptlite[images]'")
    ):
        open_samples(config_for(tmp_path))


RUN = """
model=resnet18 model.blocks=1 model.width=8 precision=fp32 run.name=images schedule=constant schedule.warmup_steps=0
data=image_folder data.size=16 data.validation_fraction=0.3 data.workers=1 data.global_batch_size=8
trainer.max_epochs=3 optimizer.lr=3e-3
""".split()


@pytest.mark.slow
def test_a_run_learns_and_resumes(tmp_path):
    for name, value in (("a", 20), ("b", 200)):
        write(tmp_path / "images", name, 24, value=value)
    folder = tmp_path / "run"

    def run(*more: str) -> list[dict]:
        config = load([*RUN, f"data.path={tmp_path}/images", f"run.dir={folder}", *more])
        with without_plots():
            assert pretrain(config).exit_code == 0
        return read_metrics(folder)

    run("trainer.stop_step=2")
    rows = run("trainer.stop_step=null")
    assert rows[-1]["val_accuracy"] > 0.9
    assert max(row.get("epoch", 0) for row in rows) >= 3
