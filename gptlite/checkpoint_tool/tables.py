"""Text in columns."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from gptlite.metrics.console import format_duration


def facts(pairs: Sequence[tuple[str, str]], width: int = 11) -> Iterator[str]:
    """Lines of a word and what it says; an empty one is left out."""
    return (f"  {word:<{width}} {text}" for word, text in pairs if text)


def shape(sizes: Sequence[int]) -> str:
    """`[12, 4]`; a single number is `[]`."""
    return f"[{', '.join(map(str, sizes))}]"


def when(created: str) -> tuple[str, str]:
    """A manifest's `created` to the minute, UTC, and how long ago that is; what cannot be read stands as it is."""
    try:
        then = datetime.fromisoformat(created)
        age = (datetime.now(UTC) - then).total_seconds()
    except (TypeError, ValueError):
        return str(created), ""
    return f"{then.astimezone(UTC):%Y-%m-%d %H:%M}", format_duration(max(0, age))
