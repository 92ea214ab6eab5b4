"""`select`: which tasks of an environment are trained on, or evaluated."""

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import field_validator

from millrace.config.section import ConfigSection, option, table

_SLICE = re.compile(r"(\d*):(\d*)(?::(\d*))?")
_LISTS = ("idx", "ids", "keys", "names")


class TaskMatchConfig(ConfigSection):
    """Tasks by position or identity; any list may name a task."""

    idx: list[str] = table(
        list,
        'Positions from 0 in the environment\'s order: numbers, or slices `"start:stop:step"` with optional parts. A '
        'single number or text, such as `"0:10,17"`, is a list.',
    )
    ids: list[str] = table(
        list, "Ids of tasks in their environment: `id` of their data (v1); the column `id`, else `example_id` (v0)."
    )
    keys: list[str] = table(list, "Task ids as in Millrace's samples and events, or the `key` of a v1 task.")
    names: list[str] = table(list, "Names of tasks, as v1 environments have them.")

    @field_validator("idx", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        """Take one number or text for a list, and a text apart at its commas."""
        items = [value] if isinstance(value, int | str) else value
        if not isinstance(items, list) or any(not isinstance(item, int | str) for item in items):
            return items
        parts = [part.strip() for item in items for part in str(item).split(",")]
        for part in parts:
            _range_of(part)
        return parts

    @field_validator(*_LISTS)
    @classmethod
    def _once(cls, value: list[str]) -> list[str]:
        """Refuse what is named twice."""
        if twice := next((item for item in value if value.count(item) > 1), None):
            raise ValueError(f"names {twice!r} twice; name it once")
        return value

    def to_wire(self) -> dict[str, Any]:
        """Return what env-servers are told: slices as [start, stop, step], of which an open end is null."""
        lists: dict[str, Any] = {name: getattr(self, name) for name in _LISTS}
        return {**lists, "idx": [_range_of(part) for part in self.idx]}


class SelectConfig(ConfigSection):
    """Which tasks of an environment are played, all by default.

    `include` keeps tasks, `exclude` drops some of them, then `shuffle`, `skip` and `limit` pick from the rest, as
    in `SelectConfig` of verifiers 0.4.
    """

    include: TaskMatchConfig = table(TaskMatchConfig, "Keep these alone; all if it names none.")
    exclude: TaskMatchConfig = table(TaskMatchConfig, "Drop these.")
    shuffle: bool = option(False, "Shuffle what is kept, before `skip` and `limit`.")
    seed: int = option(0, "Seed of `shuffle`.", ge=0)
    skip: int = option(0, "Drop so many, from the first on.", ge=0)
    limit: int | None = option(None, "Take at most so many of the rest; all if left out.", ge=1)

    def to_wire(self, *, most: int = -1) -> dict[str, Any]:
        """Return what env-servers are told; `most` tasks at the most, all if it is below 1."""
        limits = [each for each in (self.limit, most if most > 0 else None) if each is not None]
        values = {"shuffle": self.shuffle, "seed": self.seed, "skip": self.skip}
        both = {"include": self.include.to_wire(), "exclude": self.exclude.to_wire()}
        return {**both, **values, "limit": min(limits, default=None)}


def selection_json(
    *,
    train: SelectConfig | None = None,
    evaluated: SelectConfig | None = None,
    num_evaluated: int = -1,
    trained: Sequence[SelectConfig | None] = (),
) -> str:
    """Return which tasks of an environment are played, as an env-server is told it; empty where all are.

    `trained` are the selections of all training environments with the same id and args: none of their tasks may be
    among those that `evaluated` chooses. `num_evaluated` is `num_examples`.
    """
    if train is None and evaluated is None:
        return ""
    said: dict[str, Any] = {}
    if train is not None:
        said["train"] = train.to_wire()
    if evaluated is not None:
        said["eval"] = evaluated.to_wire(most=num_evaluated)
        said["apart_from"] = [(each or SelectConfig()).to_wire() for each in trained]
    return json.dumps(said, sort_keys=True)


def _range_of(part: str) -> list[int | None]:
    """Return a number or slice as [start, stop, step]. Raises ValueError."""
    if part.isdecimal() and part.isascii():
        return [int(part), int(part) + 1, 1]
    match = _SLICE.fullmatch(part)
    if match is None or not part.isascii():
        raise ValueError(f'{part!r} is no position: write a number from 0, or a slice such as "0:100" or "::2"')
    start, stop, step = (int(each) if each else None for each in match.groups())
    if step == 0:
        raise ValueError(f"slice {part!r} has a step of 0")
    if stop is not None and (start or 0) >= stop:
        raise ValueError(f"slice {part!r} is empty")
    return [start or 0, stop, step or 1]
