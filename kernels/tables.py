"""Text tables."""


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their longest cell; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
