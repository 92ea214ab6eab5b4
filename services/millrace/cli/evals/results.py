"""What an evaluation came to: `eval.json` for programs, a table for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.cli.evals.prepare import PreparedEval
from millrace.cli.view.text import duration
from millrace.v1 import event_pb2, run_pb2

_OWN = ("reward/sem", "truncated", "turns", "seconds", "endpoint_retries")


def results(
    prepared: PreparedEval, run: run_pb2.Run, reports: Sequence[event_pb2.EvalCompleted], *, seconds: float
) -> dict[str, Any]:
    """Everything as plain data; `envs` in the order of the config."""
    config = prepared.config
    return {
        "name": run.name,
        "uid": run.uid,
        "model": config.model.name,
        "endpoints": [] if config.client is None else list(config.client.base_url),
        "rollouts_per_example": config.rollouts_per_example,
        "pass_threshold": config.pass_threshold,
        "seconds": round(seconds, 3),
        "envs": {report.env: _env(report) for report in reports},
    }


def _env(report: event_pb2.EvalCompleted) -> dict[str, Any]:
    metrics = dict(sorted(report.metrics.items()))
    chances = {name: value for name, value in metrics.items() if name.startswith(("pass@", "pass^"))}
    passes: dict[str, Any] = {name: value for name, value in chances.items() if "/" not in name}
    passes |= {
        f"{name}/ci95": [chances[f"{name}/low"], chances[f"{name}/high"]]
        for name in passes
        if f"{name}/low" in chances and f"{name}/high" in chances
    }
    return {
        "reward_mean": report.reward_mean,
        "reward_sem": metrics.get("reward/sem"),
        **passes,
        "num_rollouts": report.num_rollouts,
        "num_failed": report.num_failed,
        "failed_tasks": list(report.failed_tasks),
        "endpoint_retries_mean": metrics.get("endpoint_retries"),
        "truncated": metrics.get("truncated"),
        "turns_mean": metrics.get("turns"),
        "rollout_seconds_mean": metrics.get("seconds"),
        "seconds": report.seconds,
        "metrics": {name: value for name, value in metrics.items() if name not in chances and name not in _OWN},
    }


def figures(data: Mapping[str, Any]) -> dict[str, float]:
    """Return what results say of each environment, under the names that evaluations of a run have in its metrics."""
    values: dict[str, Any] = {}
    for env, found in data["envs"].items():
        prefix = f"eval/{env}"
        values |= {
            f"{prefix}/reward/mean": found["reward_mean"],
            **{f"{prefix}/{name}": found[name] for name in ("num_rollouts", "num_failed", "seconds")},
            **{f"{prefix}/{name}": value for name, value in found.items() if name.startswith(("pass@", "pass^"))},
            **{f"{prefix}/metrics/{name}": value for name, value in found["metrics"].items()},
            f"{prefix}/metrics/reward/sem": found["reward_sem"],
            f"{prefix}/metrics/truncated": found["truncated"],
            f"{prefix}/metrics/turns": found["turns_mean"],
        }
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def table(data: dict[str, Any]) -> list[str]:
    """One line per policy and environment: reward ± standard error, pass@k with its interval, rollouts.

    All figures of a line are over `rollouts`, in which the failed ones count as reward 0 and as not passed.
    """
    policies: list[dict[str, Any]] = data.get("policies") or [data]
    lines = [(each.get("policy", ""), name, env) for each in policies for name, env in each["envs"].items()]
    ks = list(dict.fromkeys(k for *_, env in lines for k in env if k.startswith("pass@") and "/" not in k))
    rows = [["policy", "environment", "reward", *ks, "rollouts", "failed", "time"]]
    for policy, name, env in lines:
        sem = "" if env["reward_sem"] is None else f" ± {env['reward_sem']:.3f}"
        total = env["num_rollouts"] + env["num_failed"]
        counts = [str(total), str(env["num_failed"]), duration(env["seconds"])]
        rows.append([policy, name, f"{env['reward_mean']:.3f}{sem}", *(_chance(env, k) for k in ks), *counts])
    if "policies" not in data:
        rows = [row[1:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _chance(env: dict[str, Any], k: str) -> str:
    if k not in env:
        return "–"
    interval = env.get(f"{k}/ci95")
    return f"{env[k]:.3f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
