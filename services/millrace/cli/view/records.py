"""Show samples, lineage and comparisons of runs in a terminal.

Text that a model wrote is untrusted: control characters are replaced by visible signs, so that it cannot control the
terminal.
"""

import datetime
import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from millrace.cli.offline.run_store import RunSnapshot
from millrace.cli.offline.samples import SampleRecord
from millrace.cli.view.output import Paint
from millrace.cli.view.text import curve, printable, size, table
from millrace.config import EvalRunConfig, RLConfig
from millrace.config.tree import differences
from millrace.readers.exports.conversation import content_of, given_of, messages_of
from millrace.telemetry.logging import masked
from millrace.v1 import lineage_pb2, rollout_pb2
from millrace.v1 import run_service_pb2 as rs

if TYPE_CHECKING:
    from millrace.rollouts.types import Rollout

PLAIN = Paint()
_MAX_CELL = 60


def sample_table(samples: Sequence[SampleRecord], *, has_versions: bool = True, paint: Paint = PLAIN) -> str:
    """Return a table with one line per sample: id, task, reward, and the beginnings of prompt and reply.

    `has_versions` is false for an evaluation of one fixed model.
    """
    rows = []
    for found in samples:
        rollout, messages = found.rollout, messages_of(found.rollout)
        first = next((content_of(m) for m in messages if m.get("role") == "user"), "")
        last = content_of(messages[-1]) if messages and messages[-1].get("role") != "user" else ""
        rows.append(
            [
                found.id,
                f"{rollout.env}{_evaluated(rollout) if has_versions else ''}",
                f"{rollout.ordinal}.{rollout.member}",
                str(rollout.status),
                _reward(rollout),
                str(rollout.num_tokens or "–"),
                _cell(first),
                _cell(last if rollout.error is None else f"{rollout.error.type}: {rollout.error.message}"),
            ]
        )
    return table(
        rows,
        header=["id", "environment", "task", "status", "reward", "tokens", "prompt", "reply or error"],
        paint=paint.sample_cell,
    )


def sample_lines(found: SampleRecord, *, has_versions: bool = True) -> Iterator[str]:
    """Yield the lines of a whole sample: its figures, then every message.

    `has_versions` is false for an evaluation of one fixed model.
    """
    rollout = found.rollout
    evaluated, versions = (_evaluated(rollout), f"policy {_versions(rollout)}  ") if has_versions else ("", "")
    yield (
        f"── {found.id}  batch {found.step} (of step {found.step + 1})  {rollout.env}{evaluated}  "
        f"task {rollout.ordinal}.{rollout.member}  {rollout.status}  "
        f"reward {_reward(rollout)}  {rollout.num_tokens or '–'} tokens  {rollout.num_turns or '–'} turns  "
        f"{versions}{rollout.seconds:.1f} s"
    )
    metrics = "  ".join(f"{name} {value:.3g}" for name, value in sorted(rollout.metrics.items()))
    if metrics or rollout.stop_condition:
        yield printable(f"   {metrics}  stop: {rollout.stop_condition or '–'}").rstrip()
    if rollout.error is not None:
        yield printable(f"   {rollout.error.type}: {rollout.error.message}")
        yield from (printable(f"   {line}") for line in rollout.error.frames.splitlines())
    for name, value in given_of(rollout).items():
        yield printable(f"   {name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    for message in messages_of(rollout):
        yield f"{printable(str(message.get('role', '?')))}:"
        yield from (f"  {line}" for line in printable(content_of(message)).split("\n"))
    yield ""


def _reward(rollout: "Rollout") -> str:
    """Return the reward as text; a dash if the rollout failed."""
    return f"{rollout.reward:.3f}" if rollout.error is None else "–"


def _versions(rollout: "Rollout") -> str:
    """Return the oldest and the newest policy version that answered, as text; a dash if no token was sampled."""
    if rollout.min_version is None:
        return "–"
    oldest, newest = f"v{rollout.min_version}", f"v{rollout.max_version}"
    return oldest if oldest == newest else f"{oldest}–{newest}"


def _evaluated(rollout: "Rollout") -> str:
    """Return a suffix with the evaluated policy version; empty for a training rollout."""
    if rollout.purpose.value != "eval" or rollout.min_version is None:
        return ""
    newest = "" if rollout.min_version == rollout.max_version else f"–v{rollout.max_version}"
    return f" (eval of v{rollout.min_version}{newest})"


def _cell(text: str) -> str:
    """Return text for a cell of a table: on one line, without control characters, cut to 60 characters."""
    line = printable(text.replace("\n", "⏎"))
    return line if len(line) <= _MAX_CELL else line[: _MAX_CELL - 1] + "…"


# Where a rollout or a policy version comes from and what came of it, as indented lines.

_MOST_STEPS = 24


def lineage_lines(found: rs.GetLineageResponse) -> list[str]:
    """Return the lineage of a sample or a version as lines, from its origin to what came of it."""
    if found.WhichOneof("lineage") == "rollout":
        return list(_of_rollout(found.rollout))
    return list(_of_version(found.version))


def _of_rollout(found: lineage_pb2.RolloutLineage) -> Iterator[str]:
    """Yield the lines of a sample's lineage.

    They name the policies that made it, its batch, and the version that it became part of.
    """
    yield from _rollout(found.rollout)
    yield "made by"
    for each in found.made_by:
        yield from _version(each, with_batch=True)
    if not found.made_by:
        yield "  no policy: nothing of it was sampled"
    yield "trained on in" if found.rollout.is_trained else "resolved by, and not trained on in"
    yield from _batch(found.batch)
    if found.HasField("became"):
        yield "which made"
        yield from _version(found.became)


def _of_version(found: lineage_pb2.VersionLineage) -> Iterator[str]:
    """Yield the lines of a version's lineage: its batch, what was sampled with it, the next version."""
    yield from _version(found.version)
    if found.version.HasField("batch"):
        yield "made from"
        yield from _batch(found.version.batch)
        yield from _some(found.made_from)
    yield "sampled tokens of"
    yield from _some(found.made)
    if found.trained_steps:
        steps = ", ".join(str(batch + 1) for batch in found.trained_steps[:_MOST_STEPS])
        more = " …" if len(found.trained_steps) > _MOST_STEPS else ""
        yield f"  trained on in step{'s' if len(found.trained_steps) > 1 else ''} {steps}{more}"
    yield "next"
    if found.HasField("next"):
        yield from _version(found.next)
    else:
        yield f"  version {found.version.version + 1} is not there"


def _version(each: lineage_pb2.TracedVersion, *, with_batch: bool = False) -> Iterator[str]:
    """Yield the lines of one policy version: digest, manifest, replicas, checkpoint, and its batch if `with_batch`."""
    tokens = f"  {each.num_tokens} tokens" if each.num_tokens else ""
    yield f"  policy v{each.version}{tokens}{_published(each)}"
    if each.digest:
        yield f"    digest      {each.digest}"
    if each.uri:
        yield f"    manifest    {each.uri}"
    if each.replicas:
        yield f"    served by   {', '.join(dict.fromkeys(map(printable, each.replicas)))}"
    if each.HasField("checkpoint"):
        saved = each.checkpoint
        yield f"    checkpoint  step {saved.step}  {size(saved.size_bytes)}  {saved.uri}"
    if with_batch and each.HasField("batch"):
        yield f"    made from   batch {each.batch.step}  {each.batch.key or '(not there)'}"


def _published(each: lineage_pb2.TracedVersion) -> str:
    """Return when a version was published and how large it is, as text to append."""
    if each.HasField("publish_time"):
        when = each.publish_time.ToDatetime(datetime.UTC)
        return f"  published {when:%Y-%m-%d %H:%M:%S} UTC, {size(each.size_bytes)} ({each.codec or '?'})"
    return "  the start policy" if each.version == 0 else "" if each.is_known else "  not published yet"


def _batch(each: lineage_pb2.TracedBatch) -> Iterator[str]:
    """Yield the lines of one batch: rollouts, what was dropped, its object, and a problem if it has one."""
    if not each.key:
        yield f"  step {each.step + 1}, whose batch {each.step} is not there"
        return
    reward = f", mean reward {each.reward_mean:.3f}" if each.HasField("reward_mean") else ""
    done = "" if each.is_done else "  (the step is not done)"
    which = f"step {each.step + 1}, batch {each.step}"
    yield f"  {which}: {each.num_rollouts} rollouts, {each.num_trained} trained on{reward}{done}"
    if each.dropped:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(each.dropped.items()))
        yield f"    groups dropped: {printable(dropped)}"
    yield f"    batch       {each.key}"
    if each.problem:
        yield f"    problem     {printable(each.problem)}"


def _some(found: lineage_pb2.TracedRollouts) -> Iterator[str]:
    """Yield a line with the number of rollouts and the ids of the first ones."""
    if not found.num_rollouts:
        yield "  no rollout that is resolved"
        return
    shown = ", ".join(_id(each) for each in found.rollouts)
    more = found.num_rollouts - len(found.rollouts)
    yield f"  {found.num_rollouts} rollouts: {shown}{f', and {more} more' if more else ''}"


def _rollout(each: rollout_pb2.Rollout) -> Iterator[str]:
    """Yield the lines of one sample: its figures, and the beginnings of prompt and completion."""
    reward = f"{each.reward:.3f}" if each.HasField("reward") else "–"
    advantage = f"  advantage {each.advantage:+.3f}" if each.HasField("advantage") else ""
    yield (
        f"sample {_id(each)}  {printable(each.env)}  task {each.ordinal}.{each.member}  {each.status}"
        f"  reward {reward}{advantage}  {each.num_tokens} tokens"
    )
    for label, text in (("prompt", each.prompt), ("completion", each.completion)):
        if text:
            yield f"  {label:<12}{printable(text.replace(chr(10), '⏎'))[:100]}"


def _id(each: rollout_pb2.Rollout) -> str:
    """Return the id of a sample, the last part of its name in the API."""
    return each.name.rpartition("/")[2]


# Runs side by side: their curves on one scale, their last values, and where their configs differ.

CURVES = (
    "reward/mean", "loss/mean", "mismatch_kl/mean", "entropy/mean", "batch/off_policy_level/mean", "progress/tokens",
    "time/step", "time/wait_for_batch",
)  # fmt: skip
"""Metrics that are compared by default, besides the rewards of all evaluations."""
_WIDTH = 20
_MAX_VALUE = 40


def chosen_metrics(runs: Sequence[RunSnapshot], named: Sequence[str]) -> list[str]:
    """Return the metrics to show: `named`, or if that is empty the default ones that at least one run has."""
    there = {name for run in runs for name in run.metrics} - {"step"}
    if named:
        return list(named)
    evals = sorted(name for name in there if name.startswith("eval/") and name.endswith("/reward/mean"))
    return [name for name in (CURVES[0], *evals, *CURVES[1:]) if name in there]


def config_differences(runs: Sequence[RunSnapshot], secrets: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the config keys that differ between the runs, with the value of each run, None where it does not have the
    key.

    `secrets` are texts that are masked in the values.
    """
    flat = [{each.key: each.value for each in differences(masked(run.config, secrets), _model(run))} for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    found = {key: [config.get(key) for config in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values[1:])}


def compare_lines(runs: Sequence[RunSnapshot], metrics: Sequence[str], differing: dict[str, list[Any]]) -> list[str]:
    """Return the comparison as tables for the terminal.

    `metrics` are the names of those to show. `differing` has the config keys that differ, each with the values in the
    order of `runs`.
    """
    names = [printable(run.name) for run in runs]
    heads = [[run.kind, run.state, str(run.num_steps)] for run in runs]
    rows = [[label, *(head[at] for head in heads)] for at, label in enumerate(("kind", "state", "steps"))]
    rows += [[printable(name), *_cells(runs, name)] for name in metrics]
    lines = table(rows, header=["", *names]).splitlines()
    if not metrics:
        lines.append("no metric is reported yet: events reach the object store within 10 s")
    lines.append("")
    if not differing:
        return [*lines, "the configs are equal"]
    shown = [[printable(key), *(_value(each) for each in values)] for key, values in differing.items()]
    return lines + table(shown, header=["differing key", *names]).splitlines()


def compare_json(runs: Sequence[RunSnapshot], metrics: Sequence[str], differing: dict[str, list[Any]]) -> str:
    """Return the comparison as JSON; metric values that are not finite are null.

    `metrics` are the names of those to show. `differing` has the config keys that differ, each with the values in the
    order of `runs`.
    """
    found = [
        {
            "name": run.name,
            "uid": run.uid,
            "kind": run.kind,
            "state": run.state,
            "steps": run.num_steps,
            "metrics": {
                name: [[step, value if math.isfinite(value) else None] for step, value in run.points(name)]
                for name in metrics
            },
        }
        for run in runs
    ]
    return json.dumps({"runs": found, "config": differing}, indent=2)


def _cells(runs: Sequence[RunSnapshot], metric: str) -> Iterator[str]:
    """Yield last value and curve of each run, all on the same scale."""
    curves = [[value for _, value in run.points(metric)] for run in runs]
    finite = [value for values in curves for value in values if math.isfinite(value)] or [0.0]
    for values in curves:
        if not values:
            yield "–"
            continue
        bars = curve(values, width=_WIDTH, low=min(finite), high=max(finite))
        yield f"{values[-1]:<9.4g} {bars}"


def _value(value: Any) -> str:
    """Return a value of a config as text for a cell, cut to 40 characters; a dash for None."""
    text = "–" if value is None else printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"


def _model(run: RunSnapshot) -> type[RLConfig] | type[EvalRunConfig]:
    """Return the config class of a run of this kind."""
    return EvalRunConfig if run.kind == "EVAL" else RLConfig
