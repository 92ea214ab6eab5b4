"""Rows of a dataset: where they come from, and which of their messages are trained on."""

from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from millrace.config.section import BrokenRule, ConfigSection, broken, option, required, table
from millrace.config.tree import Facts

Stopping = Literal["all_exhausted", "first_exhausted"]
"""When a pass over several subsets or splits ends."""


class ColumnsConfig(ConfigSection):
    """Names of the columns."""

    messages: str = option("messages", "The conversation.", min_length=1)
    prompt: str = option("prompt", "What is answered.", min_length=1)
    completion: str = option("completion", "The answer.", min_length=1)
    tools: str = option("tools", "Definitions of tools.", min_length=1)
    tool_defs: str = option("tool_defs", "Definitions of tools, where `tools` has none.", min_length=1)
    chat_template_kwargs: str = option("chat_template_kwargs", "Arguments of the chat template.", min_length=1)


class DataSourceConfig(ConfigSection):
    """Where rows come from.

    A row has `messages`, or `prompt` and `completion`, both text or both lists of messages; beside them it may have
    `tools` (or `tool_defs`) and `chat_template_kwargs`, each as it is or as JSON text.
    """

    name: str = option(
        "PrimeIntellect/Reverse-Text-SFT",
        "File (JSON lines or array, also `.gz` or `.zst`; Parquet; Arrow), directory of such files, or Hub id.",
        min_length=1,
    )
    split: str = option("train", "Split of a Hub dataset without `splits`.", min_length=1)
    subsets: list[str] | None = option(
        None,
        "Subsets to mix: Hub configurations, `<subset>.jsonl` or directories; all if left out.",
    )
    splits: list[str] | None = option(
        None,
        "Splits to mix: of the Hub, or `<split>.jsonl`; with `subsets`, one for each.",
    )
    columns: ColumnsConfig = table(ColumnsConfig, "What the columns are called in the data.")
    probabilities: list[float] | None = option(
        None,
        "Weights of the subsets or splits; they take turns if left out.",
    )

    @field_validator("subsets", "splits")
    @classmethod
    def _some_names(cls, names: list[str] | None) -> list[str] | None:
        """Return the names; raise ValueError for a list that is empty or has an empty name.

        None means the whole data set.
        """
        if names is not None and not (names and all(names)):
            raise ValueError("must name at least one, and no name may be empty; leave it out for the whole data set")
        return names

    @field_validator("probabilities")
    @classmethod
    def _above_zero(cls, values: list[float] | None) -> list[float] | None:
        """Return the probabilities; raise ValueError if the list is empty or a number is not above 0.

        The rows of a source with probability 0 would never be exhausted.
        """
        if values is not None and not (values and all(value > 0 for value in values)):
            raise ValueError("must be numbers above 0; leave a subset out that is not wanted")
        return values

    @property
    def num_sources(self) -> int:
        """Return how many subsets or splits are mixed, at least 1."""
        return len(self.subsets or self.splits or [""])

    def broken_source_rules(self, prefix: str) -> Iterator[BrokenRule]:
        """Yield violations if subsets, splits and probabilities differ in number.

        `prefix` is the dotted path of this table.
        """
        if self.subsets and self.splits and len(self.subsets) != len(self.splits):
            message = f"has {len(self.splits)} names, `{prefix}.subsets` has {len(self.subsets)}; give one per subset"
            yield broken(message, f"{prefix}.splits", f"{prefix}.subsets")
        if self.probabilities and len(self.probabilities) != self.num_sources:
            given = len(self.probabilities)
            message = f"has {given} numbers for {self.num_sources} subsets or splits; give one for each"
            yield broken(message, f"{prefix}.probabilities", f"{prefix}.subsets", f"{prefix}.splits")


class LossMaskConfig(ConfigSection):
    """Roles that are trained on."""

    system: bool = option(False, "System messages.")
    user: bool = option(False, "User messages, and the prompt of a text row.")
    assistant: bool = option(True, "Assistant messages with their stop token, without header.")
    tool: bool = option(False, "Replies of tools.")


class DatasetConfig(DataSourceConfig):
    """Rows that every step of an RL run learns, too, by cross-entropy."""

    name: str = required(
        "As `data.name` of fine-tuning; every machine of the trainer reads it.",
        min_length=1,
    )
    stopping_strategy: Stopping = option(
        "all_exhausted",
        "A pass ends when the rows of all subsets or splits were taken (small ones repeat), or of one.",
    )
    loss_mask: LossMaskConfig = table(LossMaskConfig, "Messages of which roles are trained on.")
    rows_per_step: int = option(
        16,
        "Rows per step, cut at `trainer.model.seq_len`.",
        ge=1,
    )
    weight: float = option(1.0, "Factor of their mean cross-entropy in the loss.", gt=0)
    shuffle: bool = option(True, "Draw rows in random order, anew in every pass.")
    seed: int = option(0, "Seed of the order.", facts=Facts(follows="seed", default_text="`seed`"), ge=0)

    def broken_rules(self, where: str) -> Iterator[BrokenRule]:
        """Yield the rules over several keys of this table that do not hold.

        `where` is the table's dotted path, for messages.
        """
        yield from self.broken_source_rules(where)
        if not any(self.loss_mask.model_dump().values()):
            yield broken("trains on no role; set one of its keys to true", f"{where}.loss_mask")
