"""Ways to damage a step folder, and to heal it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def files_of(folder: Path) -> list[str]:
    """Every file below a folder, the manifest too, by its name relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def flip(path: Path, offset: int | None = None, mask: int = 1) -> None:
    """Changes bits of one byte of a file, of the one in the middle unless told."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= mask
    path.write_bytes(content)


@contextmanager
def wounded(path: Path, content: bytes | None) -> Iterator[None]:
    """The file with other bytes, None without it, while the block runs."""
    intact = path.read_bytes()
    assert content != intact
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(intact)


def flips(folder: Path, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` times a file and its bytes, one bit of them changed: half drawn over all bytes, half by file in turn."""
    draw, contents = random.Random(seed), {name: (folder / name).read_bytes() for name in files_of(folder)}
    names, sizes = list(contents), [len(content) for content in contents.values()]
    for number in range(count):
        (name,) = draw.choices(names, sizes) if number % 2 else [names[number // 2 % len(names)]]
        content = bytearray(contents[name])
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        yield name, bytes(content)


def cuts(content: bytes, count: int, seed: int) -> list[bytes]:
    """The content cut off at `count` places, or at all if it has fewer: its two ends, and between them at random."""
    between = range(1, len(content) - 1)
    lengths = {0, len(content) - 1, *random.Random(seed).sample(between, min(count - 2, len(between)))}
    return [content[:length] for length in sorted(lengths)]
