"""Exchange of checkpoints in memory between ranks."""

from gptlite.satellites.elastic.shelf import Shelf


def hand_over(shelf: Shelf, active: int) -> None:
    """Move what spare ranks hold to the first `active` ranks. Collective over all ranks."""
