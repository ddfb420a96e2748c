"""Arguments of `gptlite eval`, which its ranks receive too."""

from dataclasses import dataclass, field


@dataclass
class Arguments:
    """Command-line arguments except those of the layout."""

    checkpoint: str = "latest"
    data: str | None = None
    samples: int | None = None
    tasks: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: str | None = None
    output: str | None = None
    micro_batch_size: int = 16
    precision: str = "auto"
    tokenizer: str | None = None
    plugins: list[str] = field(default_factory=list)

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names in `tasks`."""
        return tuple(filter(None, (each.strip() for each in (self.tasks or "").strip("[]").split(","))))
