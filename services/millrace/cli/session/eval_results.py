"""What an evaluation came to: `eval.json` for programs, a table for people."""

from collections.abc import Sequence
from typing import Any

from millrace.cli.session.eval_prepare import PreparedEval
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
    passes = {name: value for name, value in metrics.items() if name.startswith(("pass@", "pass^"))}
    return {
        "reward_mean": report.reward_mean,
        "reward_sem": metrics.get("reward/sem"),
        **passes,
        "num_rollouts": report.num_rollouts,
        "num_failed": report.num_failed,
        "endpoint_retries_mean": metrics.get("endpoint_retries"),
        "truncated": metrics.get("truncated"),
        "turns_mean": metrics.get("turns"),
        "rollout_seconds_mean": metrics.get("seconds"),
        "seconds": report.seconds,
        "metrics": {name: value for name, value in metrics.items() if name not in passes and name not in _OWN},
    }


def table(data: dict[str, Any]) -> list[str]:
    """One line per environment: reward ± standard error, pass@k, rollouts."""
    envs: dict[str, dict[str, Any]] = data["envs"]
    ks = list(dict.fromkeys(name for env in envs.values() for name in env if name.startswith("pass@")))
    head = ["environment", "reward", *ks, "rollouts", "failed", "time"]
    rows = [head]
    for name, env in envs.items():
        sem = "" if env["reward_sem"] is None else f" ± {env['reward_sem']:.3f}"
        passes = ["–" if k not in env else f"{env[k]:.3f}" for k in ks]
        counts = [str(env["num_rollouts"]), str(env["num_failed"]), duration(env["seconds"])]
        rows.append([name, f"{env['reward_mean']:.3f}{sem}", *passes, *counts])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
