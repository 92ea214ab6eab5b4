"""Runs side by side: their curves on one scale, their last values, and where their configs differ."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from millrace.cli.offline.look import RunLook
from millrace.cli.view.text import curve, printable, table
from millrace.config import EvalRunConfig, RLConfig
from millrace.config.defaults import differences
from millrace.telemetry.redact import masked

CURVES = (
    "reward/mean", "loss/mean", "mismatch_kl/mean", "entropy/mean", "batch/off_policy_level/mean", "progress/tokens",
    "time/step", "time/wait_for_batch",
)  # fmt: skip
"""What is compared unless metrics are named, with the rewards of all evaluations."""
_WIDTH = 20
_MAX_VALUE = 40


def chosen_metrics(runs: Sequence[RunLook], wanted: Sequence[str]) -> list[str]:
    """The metrics to show: those that are named, or the usual ones that some run has."""
    there = {name for run in runs for name in run.metrics} - {"step"}
    if wanted:
        return list(wanted)
    evals = sorted(name for name in there if name.startswith("eval/") and name.endswith("/reward/mean"))
    return [name for name in (CURVES[0], *evals, *CURVES[1:]) if name in there]


def config_differences(runs: Sequence[RunLook], secrets: tuple[str, ...]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all runs, with those; None where a run has none. Secrets are masked."""
    flat = [{each.key: each.value for each in differences(masked(run.config, secrets), _model(run))} for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    found = {key: [config.get(key) for config in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values[1:])}


def compare_lines(runs: Sequence[RunLook], metrics: Sequence[str], differing: dict[str, list[Any]]) -> list[str]:
    """The comparison for people."""
    names = [printable(run.name) for run in runs]
    heads = [[run.kind, run.state, str(run.num_steps)] for run in runs]
    rows = [[label, *(head[at] for head in heads)] for at, label in enumerate(("kind", "state", "steps"))]
    rows += [[printable(name), *_cells(runs, name)] for name in metrics]
    lines = table(rows, header=["", *names]).splitlines()
    if not metrics:
        lines.append("no metric is told yet: events reach the object store within 10 s")
    lines.append("")
    if not differing:
        return [*lines, "the configs are equal"]
    shown = [[printable(key), *(_value(each) for each in values)] for key, values in differing.items()]
    return lines + table(shown, header=["differing key", *names]).splitlines()


def compare_json(runs: Sequence[RunLook], metrics: Sequence[str], differing: dict[str, list[Any]]) -> str:
    """The comparison for programs; a value that is not finite is null."""
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


def _cells(runs: Sequence[RunLook], metric: str) -> Iterator[str]:
    """Curve and last value of each run; all curves of a metric have one scale."""
    curves = [[value for _, value in run.points(metric)] for run in runs]
    finite = [value for values in curves for value in values if math.isfinite(value)] or [0.0]
    for values in curves:
        if not values:
            yield "–"
            continue
        bars = curve(values, width=_WIDTH, low=min(finite), high=max(finite))
        yield f"{values[-1]:<9.4g} {bars}"


def _value(value: Any) -> str:
    text = "–" if value is None else printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"


def _model(run: RunLook) -> type[RLConfig] | type[EvalRunConfig]:
    return EvalRunConfig if run.kind == "EVAL" else RLConfig
