"""The steps of an orchestrator that was measured: what each batch was, and the table of their medians."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from millrace.config import OrchestratorConfig, RLConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    """One batch: seconds since the one before was committed, its tokens with prompts, and what its rollouts were.

    `rollout_s` and `model_s` are means over the rollouts that did not fail: wall seconds, and those of them in which
    a reply of the engine was waited for.
    """

    step: int
    seconds: float
    num_rollouts: int
    num_failed: int
    num_tokens: int
    num_sampled: int
    rollout_s: float
    model_s: float

    @property
    def tokens_per_s(self) -> float:
        """With prompts."""
        return self.num_tokens / self.seconds

    def metrics(self) -> dict[str, float | int]:
        """The line of `metrics.jsonl`."""
        return {
            "step": self.step,
            "perf/throughput": self.tokens_per_s,
            "perf/sampled_throughput": self.num_sampled / self.seconds,
            "perf/rollouts_per_s": self.num_rollouts / self.seconds,
            "progress/tokens": self.num_tokens,
            "progress/samples": self.num_rollouts,
            "progress/failed_rollouts": self.num_failed,
            "time/step": self.seconds,
            "time/rollout": self.rollout_s,
            "time/rollout/model": self.model_s,
        }


def summary(batches: Sequence[MeasuredBatch], *, cpu_s: Mapping[str, float], peak: Mapping[str, int]) -> dict[str, Any]:
    """Medians over the batches as plain data; CPU seconds over all of them and peaks in bytes, by process."""
    rows = [batch.metrics() for batch in batches]
    medians = {name: median(row[name] for row in rows) for name in rows[0] if name != "step"}
    return {
        "steps": len(batches),
        "tokens_per_s": medians["perf/throughput"],
        "sampled_tokens_per_s": medians["perf/sampled_throughput"],
        "rollouts_per_s": medians["perf/rollouts_per_s"],
        "step_s": medians["time/step"],
        "rollout_s": medians["time/rollout"],
        "model_s": medians["time/rollout/model"],
        "num_failed": sum(batch.num_failed for batch in batches),
        "cpu_s": {name: seconds / len(batches) for name, seconds in cpu_s.items()},
        "peak_bytes": dict(peak),
    }


def lines(config: RLConfig, found: Mapping[str, Any], *, engine: str) -> list[str]:
    """The summary as people read it."""
    loop, rest = config.orchestrator, found["rollout_s"] - found["model_s"]
    cpu = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found["cpu_s"].items())
    peaks = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in found["peak_bytes"].items())
    share = found["model_s"] / found["rollout_s"] if found["rollout_s"] else 0.0
    rows = [
        ("tokens/s", f"{found['tokens_per_s']:,.0f} (with their prompts)"),
        ("sampled tokens/s", f"{found['sampled_tokens_per_s']:,.0f}"),
        ("rollouts/s", f"{found['rollouts_per_s']:,.1f}"),
        *([("failed rollouts", str(found["num_failed"]))] if found["num_failed"] else []),
        ("peak memory", peaks),
        ("step", f"{found['step_s']:.3f} s"),
        ("  CPU seconds", cpu),
        ("a rollout", f"{found['rollout_s']:.3f} s"),
        ("  engine", f"{found['model_s']:.3f} s  {share:4.0%}"),
        ("  environment", f"{rest:.3f} s  {1 - share:4.0%}"),
    ]
    return [
        f"{config.model.name}: {_rollouts(loop)} rollouts a step, async level "
        f"{loop.async_level}, {engine} engine; medians of {found['steps']} steps after {1 + loop.async_level} that "
        "warm up",
        *(f"{name:<18} {value}" for name, value in rows),
    ]


def _rollouts(loop: OrchestratorConfig) -> str:
    """Return the rollouts of a step, by groups."""
    sizes = sorted(set(loop.group_sizes.values()))
    if len(sizes) == 1:
        return f"{loop.groups_per_step} × {sizes[0]}"
    return f"{loop.batch_size}, in groups of {' and '.join(map(str, sizes))},"
