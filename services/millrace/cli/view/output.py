"""Runs as tables for people and as JSON for programs. Tables go to standard output, all else to standard error."""

import datetime
import json
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict

from millrace.cli.view.lines import wait_line
from millrace.cli.view.text import count, duration, table
from millrace.runlog.events.run_status import state_name
from millrace.v1 import checkpoint_pb2, run_pb2
from millrace.v1 import run_service_pb2 as rs

_HEADER = ("NAME", "STATE", "STEP", "REWARD", "POLICY", "TOKENS", "AGE")


def runs_json(runs: Sequence[run_pb2.Run]) -> str:
    """The JSON form of the messages, as the API defines it."""
    return json.dumps([MessageToDict(run) for run in runs], indent=2)


def run_json(run: run_pb2.Run) -> str:
    """One run in the JSON form of its message."""
    return json.dumps(MessageToDict(run), indent=2)


def runs_table(runs: Sequence[run_pb2.Run], *, now: datetime.datetime) -> str:
    """One line per run."""
    return table([_row(run, now) for run in runs], header=_HEADER)


def run_details(run: run_pb2.Run, checkpoints: Sequence[checkpoint_pb2.Checkpoint], *, now: datetime.datetime) -> str:
    """All that matters of one run."""
    progress = run.progress
    lines = [
        ("name", run.name),
        ("uid", run.uid),
        ("kind", run_pb2.RunKind.Name(run.kind).removeprefix("RUN_KIND_")),
        ("state", state_name(run.state)),
        ("step", _step(progress)),
        ("reward", _reward(run)),
        ("policy", f"v{progress.policy_version}, served at least v{progress.min_inference_version}"),
        ("rollouts", f"{progress.num_rollouts} with {count(progress.num_tokens)} tokens"),
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
        lines.append(("error", f"{run.error.message} [{run.error.reason}] ({run.error.component})"))
    return "\n".join(f"{label:<12} {value}" for label, value in lines)


def _groups(progress: run_pb2.RunProgress) -> str:
    """What share of the groups was thrown away; empty before the first batch."""
    if not progress.num_groups:
        return ""
    share = progress.num_groups_dropped / progress.num_groups
    return f"{progress.num_groups} played, {progress.num_groups_dropped} of them thrown away ({share:.0%})"


def _tasks(progress: run_pb2.RunProgress) -> str:
    """How many tasks are in which pool; empty where none can move."""
    counts = (progress.num_easy_tasks, progress.num_normal_tasks, progress.num_hard_tasks)
    return "{} easy, {} normal, {} hard".format(*counts) if any(counts) else ""


def failed_rollouts(each: run_pb2.EnvRollouts) -> str:
    """What came of the rollouts of an environment of which some failed."""
    by_status = ", ".join(f"{number} {status}" for status, number in sorted(each.failed.items()))
    return (
        f"{each.num_failed} of {each.num_rollouts} rollouts of {each.env} ({by_status}); the first: {each.first_error}"
    )


def explanation(answer: rs.ExplainRunResponse) -> str:
    """The chain in words, one link per line, then every wait, longest first."""
    first, *others = answer.summary.split(" ← ")
    lines = [first] if first else []
    lines += [f"  ← {link}" for link in others]
    if others and answer.waits:
        lines.append("every wait:")
    lines += [f"  {wait_line(wait)}" for wait in answer.waits]
    return "\n".join(lines) or "nothing waits"


def _row(run: run_pb2.Run, now: datetime.datetime) -> tuple[str, ...]:
    progress = run.progress
    return (
        run.name.removeprefix("runs/"),
        state_name(run.state),
        _step(progress),
        _reward(run),
        f"v{progress.policy_version}",
        count(progress.num_tokens),
        _age(run, now),
    )


def _reward(run: run_pb2.Run) -> str:
    """Of the newest batch; a fork has steps before it has a batch of its own."""
    return f"{run.progress.reward:.3f}" if run.progress.step and run.progress.num_rollouts else "–"


def _step(progress: run_pb2.RunProgress) -> str:
    return f"{progress.step}/{progress.max_steps}" if progress.max_steps else str(progress.step)


def _age(run: run_pb2.Run, now: datetime.datetime) -> str:
    if not run.HasField("create_time"):
        return "–"
    return duration(max(0.0, (now - run.create_time.ToDatetime(datetime.UTC)).total_seconds()))


def _time(when: datetime.datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"
