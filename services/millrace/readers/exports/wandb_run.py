"""A run in Weights & Biases: the rows of the log in their order, each under its number.

The number of a row is W&B's own step (`_step`), and the training step is the metric `step`, the x axis of every plot:
evaluations and policies come when later steps are under way, and W&B takes no row below its newest one. Because the
order of the rows never changes, a second export of the run writes the same values under the same numbers.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.errors import CorruptObjectError
from millrace.readers.exports.files import redacted
from millrace.readers.exports.metrics import MetricRow
from millrace.readers.exports.process import import_extra
from millrace.readers.exports.samples import ExportedSample
from millrace.telemetry.logging import masked, secrets_of

logger = logging.getLogger(__name__)

_COLUMNS = (
    "step", "prompt", "completion", "answer", "reward", "advantage", "version", "environment", "task_id", "ordinal",
    "member", "status",
)  # fmt: skip
_DISTRIBUTIONS = ("environment", "reward", "advantage", "tokens", "version")
MAX_TABLE_ROWS = 256
"""Samples of one step that go to W&B; `millrace run export --to parquet` has all."""
_MAX_TEXT_CHARS = 20_000

SamplesOf = Callable[[int], Sequence[ExportedSample]]
"""The samples of a step."""


# Where in W&B a run goes, as its own config says.

DEFAULT_PROJECT = "millrace"


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbTarget:
    """Where in W&B the run is, and what of it goes there."""

    project: str
    id: str
    name: str
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    is_offline: bool = False
    directory: Path
    samples: bool = False
    distributions: bool = False
    interval: int = 10
    """Steps between two tables."""
    config: Mapping[str, Any] = field(default_factory=dict)


def target_of(config: Mapping[str, Any], *, uid: str, run: str, directory: Path) -> WandbTarget:
    """Return where in W&B a run goes, by its resolved config: defaults where that has no `[wandb]`.

    `run` is the run's name; W&B's own files go into `directory`.
    """
    wandb = config.get("wandb") or {}
    extras = wandb.get("log_extras") or {}
    interval = extras.get("interval")
    return WandbTarget(
        project=wandb.get("project") or DEFAULT_PROJECT,
        id=wandb.get("id") or uid,
        name=wandb.get("name") or run,
        entity=wandb.get("entity"),
        group=wandb.get("group"),
        tags=tuple(wandb.get("tags") or ()),
        is_offline=bool(wandb.get("offline")),
        directory=directory,
        samples=bool(extras.get("samples")),
        distributions=bool(extras.get("distributions")),
        interval=10 if interval is None else interval,
        config=config,
    )


class WandbRun:
    """One session of writing to a run. `finish` writes what is left, and may take as long as W&B does."""

    def __init__(self, target: WandbTarget, *, samples_of: SamplesOf, init_timeout_s: float = 90.0) -> None:
        """Open the run in W&B, or resume it; raises what the `wandb` library does.

        `samples_of` returns the samples of a step, for tables.
        """
        self._wandb = import_extra("wandb", extra="wandb")
        self._target = target
        self._samples_of = samples_of
        target.directory.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=target.project,
            entity=target.entity,
            group=target.group,
            tags=list(target.tags) or None,
            name=target.name,
            id=target.id,
            resume="allow",
            mode="offline" if target.is_offline else "online",
            dir=str(target.directory.resolve()),
            config=masked(dict(target.config), secrets_of(os.environ)),
            settings=self._wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
                init_timeout=init_timeout_s,
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.next_row: int = self._run.starting_step  # `step` is 0 in a run that was resumed
        """Rows below are in W&B already."""

    @property
    def directory(self) -> Path:
        """Return the directory of this session's files on this machine."""
        return Path(self._run.dir).parent

    def write(self, index: int, row: MetricRow) -> None:
        """Write the row number `index` of the run, unless W&B has it.

        Return at once, as W&B uploads in the background.
        """
        if index < self.next_row:
            return
        self._run.log({"step": row.step, **row.values, **self._tables(row)}, step=index, commit=True)
        self.next_row = index + 1

    def finish(self, *, exit_code: int = 0) -> None:
        """End the session; wait until everything is on disk, or uploaded.

        `exit_code` is what W&B shows of the run's end.
        """
        self._run.finish(exit_code=exit_code)
        self._wandb.teardown()  # `finish` returns before an offline session is on disk

    def _tables(self, row: MetricRow) -> dict[str, Any]:
        """Return the tables of samples that are due with a row, by name.

        Empty if none is, or the samples cannot be read.
        """
        target = self._target
        is_due = row.key.startswith("batch/") and row.step % max(target.interval, 1) == 0
        if not is_due or not (target.samples or target.distributions):
            return {}
        try:
            found = [sample for sample in self._samples_of(row.step) if sample.rollout.purpose.value == "train"]
        except CorruptObjectError as error:  # one damaged archive keeps back no metric of this step or later ones
            logger.warning("a table of samples is left out of W&B", extra={"step": row.step, "error": error.message})
            return {}
        rows = [{**each, "version": each["version_min"]} for each in redacted(found)]
        tables: dict[str, Any] = {}
        if target.samples:
            shown = [[_cut(each[name]) for name in _COLUMNS] for each in rows[:MAX_TABLE_ROWS]]
            tables["samples"] = self._wandb.Table(columns=list(_COLUMNS), data=shown)
        if target.distributions:
            values = [[each[name] for name in _DISTRIBUTIONS] for each in rows]
            tables["distributions"] = self._wandb.Table(columns=list(_DISTRIBUTIONS), data=values)
        return tables


def _cut(value: Any) -> Any:
    """Return a value; of a text at most `_MAX_TEXT_CHARS` characters."""
    return value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
