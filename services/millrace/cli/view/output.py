"""Format runs as tables and JSON, with colours on a terminal.

Tables go to standard output, everything else to standard error.
"""

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, TextIO

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from millrace.cli.view.lines import wait_line
from millrace.cli.view.text import count, curve, duration, printable, table
from millrace.cli.view.view import has_colours
from millrace.runlog.run_status import state_name
from millrace.v1 import checkpoint_pb2, run_pb2
from millrace.v1 import run_service_pb2 as rs

# Colours of single lines on a terminal: none where nobody sees them, or nobody wants them.

_STATES = {
    "RUNNING": "green", "SUCCEEDED": "green", "FAILED": "red", "DAMAGED": "red", "CANCELLED": "yellow",
    "PAUSED": "yellow",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Paint:
    """Adds colours to text, or does nothing if `is_on` is false.

    Table cells are padded first, because colour codes would count as width.
    """

    is_on: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Self:
        """Return a Paint for a stream: on for a capable terminal, unless NO_COLOR is set."""
        return cls(has_colours(stream))

    def __call__(self, text: str, colour: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
        """Return the text with codes for colour, bold and dim around it; unchanged if `is_on` is false or the text is
        blank.
        """
        if not self.is_on or not text.strip():
            return text
        return click.style(text, fg=colour, bold=bold or None, dim=dim or None)

    def run_cell(self, column: str, cell: str, padded: str) -> str:
        """Return `padded`, a cell of a table of runs in its column's width, in the colour of the column with the header
        `column`.

        `cell` is the cell's text without padding; it decides the colour of a state.
        """
        match column.upper():
            case "STATE":
                return self(padded, _STATES.get(cell, "cyan"), bold=True)
            case "AGE" | "POLICY":
                return self(padded, dim=True)
            case _:
                return padded

    def sample_cell(self, column: str, cell: str, padded: str) -> str:
        """Return `padded`, a cell of a table of samples in its column's width, in the colour of the column `column`.

        `cell` is the cell's text without padding; it decides the colour of a status.
        """
        match column:
            case "status":
                return self(padded, "green" if cell == "ok" else "red")
            case "reward":
                return self(padded, bold=True)
            case "id" | "prompt":
                return self(padded, dim=True)
            case _:
                return padded

    def state(self, name: str) -> str:
        """Return the name of a run's state in its colour."""
        return self(name, _STATES.get(name, "cyan"), bold=True)


PLAIN = Paint()
SHOWN_CURVES = {
    "reward/mean": "  curve", "loss/mean": "loss", "entropy/mean": "entropy",
    "batch/off_policy_level/mean": "staleness", "time/step": "step time",
}  # fmt: skip
"""Metrics that `millrace run show` draws on a terminal, with their labels."""
_CURVE_WIDTH = 40
_HEADER = ("NAME", "STATE", "STEP", "REWARD", "POLICY", "TOKENS", "AGE")


def runs_json(runs: Sequence[run_pb2.Run], *, ended: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return runs in the JSON form of the API.

    `ended` has the directories, by uid, of runs whose stack has ended; they appear as `endedStack`.
    """
    messages = [(run.uid, MessageToDict(run)) for run in runs]
    return json.dumps([{**run, "endedStack": ended[uid]} if uid in ended else run for uid, run in messages], indent=2)


def message_json(message: Message, *, indent: int | None = 2) -> str:
    """Return a message in the JSON form of the API; on one line if `indent` is None."""
    return json.dumps(MessageToDict(message), indent=indent)


def runs_table(
    runs: Sequence[run_pb2.Run],
    *,
    now: datetime.datetime,
    ended: Mapping[str, str] = MappingProxyType({}),
    paint: Paint = PLAIN,
) -> str:
    """Return a table with one line per run.

    `ended` has the directories, by uid, of runs whose stack has ended. These, the tenants and the places of queued runs
    appear in columns of their own, where a run has one.
    """
    rows, header = [_row(run, now) for run in runs], _HEADER
    if any(run.tenant for run in runs):
        rows = [(*row, run.tenant or "–") for row, run in zip(rows, runs, strict=True)]
        header = (*header, "TENANT")
    if any(run.queue_place for run in runs):
        rows = [(*row, printable(run.queue_place)) for row, run in zip(rows, runs, strict=True)]
        header = (*header, "QUEUE")
    if ended:
        stacks = [f"ended, in {ended[run.uid]}" if run.uid in ended else "runs" for run in runs]
        rows, header = [(*row, stack) for row, stack in zip(rows, stacks, strict=True)], (*header, "STACK")
    return table(rows, header=header, paint=paint.run_cell)


def eval_curves(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the reward metric of each evaluated environment in a resolved config, with the environment's name."""
    orchestrator = config.get("orchestrator")
    found = orchestrator.get("eval") if isinstance(orchestrator, dict) else None
    envs = found.get("env") if isinstance(found, dict) else None
    names = [each.get("name") for each in envs if isinstance(each, dict)] if isinstance(envs, list) else []
    return {f"eval/{name}/reward/mean": name for name in names if isinstance(name, str)}


def curve_lines(
    metrics: Mapping[str, Sequence[float | None]], evals: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[str, str]]:
    """Return label and text for each metric that has values: the last value and the curve.

    `evals` has the metrics of evaluations, with the environments' names.
    """
    lines = []
    first, *rest = SHOWN_CURVES
    for name in (first, *evals, *rest):
        values = [value for value in metrics.get(name, ()) if value is not None]
        # `min` and `max` need a value, and there may be none that is finite.
        finite = [value for value in values if math.isfinite(value)] or [0.0]
        if values:
            bars = curve(values, width=_CURVE_WIDTH, low=min(finite), high=max(finite))
            of = f"  {printable(evals[name])}" if name in evals else ""
            lines.append((SHOWN_CURVES.get(name, "eval"), f"{values[-1]:<9.4g} {bars}{of}"))
    return lines


def run_details(
    run: run_pb2.Run,
    checkpoints: Sequence[checkpoint_pb2.Checkpoint],
    *,
    now: datetime.datetime,
    curves: Sequence[tuple[str, str]] = (),
    paint: Paint = PLAIN,
) -> str:
    """Return everything about one run, one line per item. `curves` are lines to add, as label and text.

    `now` gives the age.
    """
    progress = run.progress
    lines = [
        ("name", run.name),
        ("uid", run.uid),
        *([("tenant", run.tenant)] if run.tenant else ()),
        ("kind", run_pb2.RunKind.Name(run.kind).removeprefix("RUN_KIND_")),
        ("state", paint.state(state_name(run.state))),
        *([("queue", printable(run.queue_place))] if run.queue_place else ()),
        ("step", _step(progress)),
        ("reward", _reward(run)),
        *curves,
        ("policy", _policy(progress)),
        ("rollouts", f"{progress.num_rollouts} with {_tokens(progress)} tokens" if progress.num_rollouts else "–"),
        *((label, text) for label, text in (("groups", _groups(progress)), ("tasks", _tasks(progress))) if text),
        *(("failed", failed_rollouts(each)) for each in progress.environments),
        ("created", _time(run.create_time.ToDatetime(datetime.UTC)) if run.HasField("create_time") else "–"),
        ("age", _age(run, now)),
        ("config", f"sha256 {run.run_hash}" if run.run_hash else "–"),
    ]
    if run.HasField("parent"):
        lines.append(("forked from", f"{run.parent.name} at step {run.parent.step}"))
    if run.labels:
        lines.append(("labels", ", ".join(f"{key}={value}" for key, value in sorted(run.labels.items()))))
    lines += [("checkpoint", f"step {saved.step}  {saved.uri}") for saved in checkpoints]
    if run.HasField("error"):
        message = printable(f"{run.error.message} [{run.error.reason}] ({run.error.component})")
        lines.append(("error", paint(message, "red")))
        if run.error.remedy:
            lines.append(("remedy", printable(run.error.remedy)))
    return "\n".join(f"{paint(f'{label:<12}', dim=True)} {value}" for label, value in lines)


def _groups(progress: run_pb2.RunProgress) -> str:
    """Return how many groups were dropped, as text; empty before the first batch."""
    if not progress.num_groups:
        return ""
    share = progress.num_groups_dropped / progress.num_groups
    return f"{progress.num_groups} played, {progress.num_groups_dropped} of them thrown away ({share:.0%})"


def _tasks(progress: run_pb2.RunProgress) -> str:
    """Return the number of tasks in each pool, as text; empty if tasks have no pools."""
    counts = (progress.num_easy_tasks, progress.num_normal_tasks, progress.num_hard_tasks)
    return "{} easy, {} normal, {} hard".format(*counts) if any(counts) else ""


def failed_rollouts(each: run_pb2.EnvRollouts) -> str:
    """Return a text about an environment's failed rollouts: how many, their statuses, the first error."""
    by_status = ", ".join(f"{number} {status}" for status, number in sorted(each.failed.items()))
    return printable(
        f"{each.num_failed} of {each.num_rollouts} rollouts of {each.env} ({by_status}); the first: {each.first_error}"
    )


def summed_up(text: str) -> rs.ExplainRunResponse:
    """Return a response that consists of a summary only."""
    return rs.ExplainRunResponse(summary=text)


def explanation(answer: rs.ExplainRunResponse) -> str:
    """Return the chain of waits as lines, one link per line, then every wait, the longest first."""
    first, *others = answer.summary.split(" ← ")
    lines = [first] if first else []
    lines += [f"  ← {link}" for link in others]
    if others and answer.waits:
        lines.append("every wait:")
    lines += [f"  {wait_line(wait)}" for wait in answer.waits]
    return printable("\n".join(lines)) or "nothing waits"


def _row(run: run_pb2.Run, now: datetime.datetime) -> tuple[str, ...]:
    """Return the cells of a run in the table of runs."""
    progress = run.progress
    return (
        run.name.removeprefix("runs/"),
        state_name(run.state),
        _step(progress),
        _reward(run),
        _policy(progress).partition(",")[0],
        _tokens(progress),
        _age(run, now),
    )


def _reward(run: run_pb2.Run) -> str:
    """Return the reward of the newest batch as text. A dash if the run has no batch of its own yet, as a new fork."""
    return f"{run.progress.reward:.3f}" if run.progress.step and run.progress.num_rollouts else "–"


def _policy(progress: run_pb2.RunProgress) -> str:
    """Return the newest version and the oldest served version as text.

    A dash while it is unknown whether version 0 exists: before the first rollout.
    """
    if not progress.policy_version and not progress.num_rollouts:
        return "–"
    return f"v{progress.policy_version}, served at least v{progress.min_inference_version}"


def _tokens(progress: run_pb2.RunProgress) -> str:
    return count(progress.num_tokens) if progress.num_tokens else "–"


def _step(progress: run_pb2.RunProgress) -> str:
    return f"{progress.step}/{progress.max_steps}" if progress.max_steps else str(progress.step)


def _age(run: run_pb2.Run, now: datetime.datetime) -> str:
    """Return the time since the run was created, as text."""
    if not run.HasField("create_time"):
        return "–"
    return duration(max(0.0, (now - run.create_time.ToDatetime(datetime.UTC)).total_seconds()))


def _time(when: datetime.datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"
