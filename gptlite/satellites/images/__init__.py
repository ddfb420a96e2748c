"""Datasets of images and of Hugging Face rows: a plug-in that comes with gptlite. Does not import torch."""

from typing import Any

from gptlite.data.registry import register_data
from gptlite.satellites.images.config import HuggingFaceConfig, ImageFolderConfig


def _image_folder(config: ImageFolderConfig) -> tuple[Any, Any]:
    from gptlite.satellites.images.folder import open_image_folder

    return open_image_folder(config)


def _huggingface(config: HuggingFaceConfig) -> tuple[Any, Any]:
    from gptlite.satellites.images.rows import open_huggingface

    return open_huggingface(config)


register_data("image_folder", ImageFolderConfig, _image_folder)
register_data("huggingface", HuggingFaceConfig, _huggingface)
