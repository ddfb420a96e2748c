"""Text tables."""


def table(rows: list[tuple[str, ...]]) -> str:
    """Return the rows as text, with columns as wide as their longest cell. The first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
