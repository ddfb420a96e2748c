"""Images in one folder per class, for `data=image_folder`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from gptlite.errors import ConfigError
from gptlite.files import open_regular
from gptlite.satellites.corpus.walk import files_below, refuse_loop
from gptlite.satellites.images.config import ImageFolderConfig
from gptlite.satellites.images.tensors import ToTensor, divided, require

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
VALIDATION = ("val", "valid", "validation", "test")


class ImageFolder:
    """Images, fp32 [3, size, size], and class indices. `files` are paths relative to `root`, with the class first."""

    def __init__(self, root: Path, files: Sequence[str], classes: Sequence[str], convert: ToTensor) -> None:
        self.root, self.files, self.classes, self.convert = root, files, classes, convert
        self._numbers = {name: number for number, name in enumerate(classes)}
        self.fingerprint = hashlib.sha256("\n".join([*classes, "", *files]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        file = self.root / self.files[index]
        try:
            with open_regular(file) as opened, Image.open(opened) as image:
                pixels = self.convert(image)
        except Exception as error:  # Pillow raises many types of errors
            raise ConfigError(f"{file} cannot be read as an image ({error}); replace or delete it") from error
        return pixels, self._numbers[self.files[index].partition("/")[0]]


def open_image_folder(config: ImageFolderConfig) -> tuple[ImageFolder, ImageFolder]:
    """Return the training and the validation images.

    Raises ConfigError for missing images, or a validation class without training images.
    """
    require("PIL", "images", "pillow")
    path = Path(config.path).expanduser()
    if not path.is_dir():
        reason = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"data.path={config.path} {reason}; give a folder with one folder of images per class")
    train = path / "train"
    other = next((path / name for name in VALIDATION if (path / name).is_dir()), None)
    if other is not None and not train.is_dir():
        raise ConfigError(f"data.path={config.path} has {other.name}/ but no train/; name the training folder train")
    root = train if train.is_dir() else path
    classes, files = find_images(root)
    convert, plain = ToTensor.of(config, augment=True), ToTensor.of(config, augment=False)
    if other is None:
        mine, held = ([files[index] for index in part] for part in divided(files, config))
        return ImageFolder(root, mine, classes, convert), ImageFolder(root, held, classes, plain)
    theirs, held = find_images(other)
    if new := [name for name in theirs if name not in classes]:
        raise ConfigError(f"{other / new[0]}: the training data has no class {new[0]}; remove or add the class")
    return ImageFolder(root, files, classes, convert), ImageFolder(other, held, classes, plain)


def find_images(root: Path) -> tuple[list[str], list[str]]:
    """Return the classes, which are the folders in `root`, and the paths of all images below `root`, sorted.

    Raises ConfigError if there is no class, or a class without images.
    """
    classes = sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not classes:
        raise ConfigError(f"{root} has no classes; put each class's images in a folder, e.g. {root / 'cat'}/1.jpg")
    files: list[str] = []
    for name in classes:
        refuse_loop("data.path", root / name)
        found = [each.relative_to(root).as_posix() for each in files_below(root / name, "data.path", SUFFIXES)]
        if not found:
            raise ConfigError(f"{root / name} has no images ({', '.join(SUFFIXES)}); remove the folder, or add images")
        files += sorted(found)
    return classes, files
