"""What the env-server counts where it happens: rollouts, appends, deaths of workers."""

from prometheus_client import Counter, Histogram

from millrace.rollouts.types import Rollout
from millrace.telemetry.metrics import SECONDS, SHORT_SECONDS, BoundedLabel

ROLLOUTS = Counter(
    "millrace_env_server_rollouts_ended_total",
    "Rollouts that ended here, by how they ended.",
    ["env", "status"],
    registry=None,
)
ROLLOUT_SECONDS = Histogram(
    "millrace_env_server_rollout_duration_seconds",
    "Seconds of a rollout from start to end, whatever its end.",
    ["env"],
    buckets=SECONDS,
    registry=None,
)
APPEND_SECONDS = Histogram(
    "millrace_env_server_append_duration_seconds",
    "Seconds from the end of a rollout until it is in the log.",
    buckets=SHORT_SECONDS,
    registry=None,
)
WORKER_DEATHS = Counter(
    "millrace_env_server_worker_deaths_total",
    "Env workers that ended although nobody had asked them to.",
    ["env"],
    registry=None,
)
WORKER_STARTS = Counter(
    "millrace_env_server_worker_starts_total",
    "Env workers that were started, by how: fork (from the template) or spawn (by themselves, which takes seconds).",
    ["how"],
    registry=None,
)
COUNTED = (ROLLOUTS, ROLLOUT_SECONDS, APPEND_SECONDS, WORKER_DEATHS, WORKER_STARTS)

env_label = BoundedLabel()


def rollout_ended(rollout: Rollout) -> None:
    """Count a rollout that ended, by environment and status, with its seconds."""
    env = env_label(rollout.env)
    ROLLOUTS.labels(env, rollout.status.value).inc()
    ROLLOUT_SECONDS.labels(env).observe(rollout.seconds)


def env_opened(env: str) -> None:
    """Create the environment's counter of dead workers with the value 0, so that alerts see its first increase."""
    WORKER_DEATHS.labels(env_label(env))


def worker_died(env: str) -> None:
    """Count a worker of the environment that ended without being asked to."""
    WORKER_DEATHS.labels(env_label(env)).inc()


def worker_started(how: str) -> None:
    """Count the start of a worker process; `how` is fork or spawn."""
    WORKER_STARTS.labels(how).inc()
