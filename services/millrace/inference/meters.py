"""What a replica exports beside its engine's own metrics, whichever engine it is."""

from collections.abc import Callable

from prometheus_client import Counter, Histogram
from prometheus_client.registry import Collector

from millrace.inference.engine import EngineStatus
from millrace.telemetry.metrics import SHORT_SECONDS, Family, Sheet, StateCollector

RUNNING = Family("millrace_inference_requests_running", "Requests that generate.")
WAITING = Family("millrace_inference_requests_waiting", "Requests that have not begun: no room, or an update.")
HELD = Family("millrace_inference_requests_held", "Requests that stand still because the engine is paused.")
GENERATED = Family("millrace_inference_generated_tokens_total", "Tokens generated; vLLM has its own counter.")
FINISHED = Family("millrace_inference_finished_requests_total", "Requests that ended.")
VERSION = Family("millrace_inference_policy_version", "Policy version that is served; -1 without one.")
LINEAGE = Family("millrace_inference_policy_lineage", "Lineage of that version; -1 without one.")
CAPACITY = Family("millrace_inference_capacity_requests", "Requests that generate at once, at most.")
PROGRESS_AGE = Family(
    "millrace_inference_progress_age_seconds", "Seconds since the engine last did something that it had to do."
)
FAMILIES = (RUNNING, WAITING, HELD, GENERATED, FINISHED, VERSION, LINEAGE, CAPACITY, PROGRESS_AGE)

UPDATES = Counter(
    "millrace_inference_policy_updates_total",
    "Attempts to serve another policy version: ok or failed.",
    ["result"],
    registry=None,
)
UPDATE_SECONDS = Histogram(
    "millrace_inference_policy_update_duration_seconds",
    "Seconds of a successful update, from the request until the version is proved and serves.",
    buckets=SHORT_SECONDS,
    registry=None,
)
PAUSE_SECONDS = Histogram(
    "millrace_inference_pause_duration_seconds",
    "Seconds for which a successful update stopped generation.",
    buckets=SHORT_SECONDS,
    registry=None,
)
FETCHED_BYTES = Counter(
    "millrace_inference_policy_fetched_bytes_total", "Bytes fetched for successful updates.", registry=None
)
COUNTED = (UPDATES, UPDATE_SECONDS, PAUSE_SECONDS, FETCHED_BYTES)
for _result in ("ok", "failed"):
    UPDATES.labels(_result)  # 0 from the beginning: `rate` sees the first one


def policy_updated(*, update_s: float, pause_s: float, fetched_bytes: int) -> None:
    """Another version serves."""
    UPDATES.labels("ok").inc()
    UPDATE_SECONDS.observe(update_s)
    PAUSE_SECONDS.observe(pause_s)
    FETCHED_BYTES.inc(fetched_bytes)


def update_failed() -> None:
    """An attempt failed; it is made again."""
    UPDATES.labels("failed").inc()


def collectors(status_of: Callable[[], EngineStatus]) -> list[Collector]:
    """What a replica exports about itself."""

    def read(sheet: Sheet) -> None:
        status = status_of()
        held = status.identity
        sheet.put(RUNNING, status.num_running)
        sheet.put(WAITING, status.num_waiting)
        sheet.put(HELD, status.num_requests if status.is_paused else 0)
        sheet.put(GENERATED, status.num_generated_tokens)
        sheet.put(FINISHED, status.num_finished)
        sheet.put(VERSION, held.version if held is not None else -1)
        sheet.put(LINEAGE, held.lineage if held is not None else -1)
        sheet.put(CAPACITY, status.max_num_seqs)
        sheet.put(PROGRESS_AGE, status.progress_age_s)

    return [StateCollector(FAMILIES, read), *COUNTED]
