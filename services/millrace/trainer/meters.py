"""The trainer's metrics, exported by rank 0. They have no label for the run, because one run is trained at a time."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from millrace.telemetry.metrics import SECONDS, Family, MetricSheet, StateCollector, make_registry

PHASE_SECONDS = Histogram(
    "millrace_trainer_step_duration_seconds",
    "Seconds of each step by phase: wait (for the batch), load, forward_backward (with the optimizer), publish and "
    "checkpoint (as far as they hold training up), and step (all of it).",
    ["phase"],
    buckets=SECONDS,
    registry=None,
)
STEPS = Counter("millrace_trainer_steps_total", "Optimizer steps.", registry=None)
TOKENS = Counter("millrace_trainer_tokens_total", "Tokens of the batches that were trained.", registry=None)
THROUGHPUT = Gauge(
    "millrace_trainer_tokens_per_second", "Tokens of the last step, by its seconds, waiting included.", registry=None
)
VERSION = Gauge("millrace_trainer_policy_version", "Newest policy version that was published.", registry=None)
PUBLISH_SECONDS = Histogram(
    "millrace_trainer_publish_duration_seconds",
    "Seconds from the snapshot of a policy until it was announced, beside the next step.",
    buckets=SECONDS,
    registry=None,
)
PUBLISH_BYTES = Counter("millrace_trainer_publish_bytes_total", "Bytes uploaded for policies.", registry=None)
FAILED = Counter(
    "millrace_trainer_runs_failed_total",
    "Runs that it gave up with an error that their owner has to see.",
    registry=None,
)
COUNTED = (PHASE_SECONDS, STEPS, TOKENS, THROUGHPUT, VERSION, PUBLISH_SECONDS, PUBLISH_BYTES, FAILED)

WORKING = Family("millrace_trainer_working", "1 while it works on a run, 0 while it is idle.")
FAMILIES = (WORKING,)


def step_completed(seconds: dict[str, float], *, num_tokens: int) -> None:
    """Record a completed optimizer step in the metrics.

    `seconds` are by phase, with the total under "step"; `num_tokens` are those of its batch.
    """
    for phase, value in seconds.items():
        PHASE_SECONDS.labels(phase).observe(value)
    STEPS.inc()
    TOKENS.inc(num_tokens)
    THROUGHPUT.set(num_tokens / seconds["step"] if seconds["step"] > 0 else 0.0)


def policy_published(version: int, *, size_bytes: int, seconds: float) -> None:
    """Record in the metrics that `version` was announced: `size_bytes` were uploaded, and it took `seconds`."""
    VERSION.set(version)
    PUBLISH_BYTES.inc(size_bytes)
    PUBLISH_SECONDS.observe(seconds)


def run_failed() -> None:
    """Count a run that was given up with an error that its owner has to see.

    It is a counter because a scrape would miss a state that lasts for seconds.
    """
    FAILED.inc()


def registry_of(is_working: Callable[[], bool]) -> CollectorRegistry:
    """Make the registry of the trainer's metrics.

    `is_working` is called at every scrape, for whether there is a run.
    """

    def read(sheet: MetricSheet) -> None:
        sheet.put(WORKING, is_working())

    return make_registry("trainer", [StateCollector(FAMILIES, read), *COUNTED])
