"""Parquet reader: the rows of one column, one row group at a time."""

from collections.abc import Iterator
from typing import Any

from gptlite.errors import needed_package
from gptlite.satellites.preprocess.inputs import Source
from gptlite.satellites.preprocess.pieces import InputPlace, Piece
from gptlite.satellites.preprocess.streams import DamagedInput

_ROWS = 256  # rows in a piece


def parquet_pieces(source: Source, place: InputPlace, column: str) -> Iterator[tuple[Piece, InputPlace, int]]:
    """Yield pieces of up to 256 rows from row `place.offset` on, each with the place after it and the bytes read.

    Raises DamagedInput for a file that is not Parquet or has no column `column` of strings.
    """
    with needed_package("pyarrow", "a .parquet file"):
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            _check_column(file, column)
            row = 0
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if row + count <= place.offset:
                    row += count
                    continue
                for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[column]):
                    start, row = row, row + batch.num_rows
                    if row <= place.offset:
                        continue
                    rows = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
                    read = source.size * row // max(file.metadata.num_rows, 1)
                    yield Piece(place.source, start + 1, rows), InputPlace(place.source, row, row + 1), read
    except (pyarrow.ArrowException, OSError) as error:
        raise DamagedInput(f"it cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def _check_column(file: Any, column: str) -> None:
    schema = file.schema_arrow
    if column not in schema.names:
        raise DamagedInput(f"it has no column {column}; give field= one of {', '.join(schema.names)}")
    kind = str(schema.field(column).type)
    if kind not in ("string", "large_string", "string_view", "binary", "large_binary"):
        raise DamagedInput(f"its column {column} has type {kind}, not string or binary")
