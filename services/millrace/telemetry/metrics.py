"""Metrics for Prometheus: those that all services have, and the parts from which each service makes its own.

Names begin with `millrace_` and end with their unit; labels are bounded (`BoundedLabel`), and never name a rollout, a
group or a step. Each service declares its own metrics in its `meters.py`, or in a module beside it. Two kinds:

* events that are counted where they happen: `Counter` and `Histogram` of prometheus_client, made with `registry=None`;
* state that is read when Prometheus asks: a `StateCollector` with the `Family` of each number.

`make_registry` puts both together for one server. docs/operations.md lists every metric.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millrace import __version__
from millrace.telemetry import waits
from millrace.telemetry.leftovers import LEFTOVERS

MAX_LABEL_VALUES = 64
"""The most values of a label; users name environments, and Prometheus keeps every name for ever."""
OTHER = "other"

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Buckets of durations that may be milliseconds with a toy model and an hour with a large one."""
SHORT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Buckets of durations that are ordinarily milliseconds."""

_COMPONENTS: tuple[str, ...] = (
    "env worker",
    "env-server",
    "inference",
    "trainer",
    "orchestrator",
    "redis",
    "object store",
    "disk",
    "operator",
)


class BoundedLabel:
    """Returns the first `limit` distinct values as they are, and `other` for later ones."""

    def __init__(self, limit: int = MAX_LABEL_VALUES) -> None:
        """Make a label that has no value yet, and at most `limit`."""
        self._limit = limit
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        """Return the value if it is known or there is room for another one, else `other`; remember it."""
        with self._lock:
            if value not in self._known and len(self._known) >= self._limit:
                return OTHER
            self._known.add(value)
            return value


@dataclass(frozen=True, slots=True)
class Family:
    """A metric that is read when asked for: a counter if its name ends in `_total`, else a gauge."""

    name: str
    text: str
    labels: tuple[str, ...] = ()

    def empty(self) -> Metric:
        """Return the Prometheus metric of this name, without a sample."""
        if self.name.endswith("_total"):
            return CounterMetricFamily(self.name, self.text, labels=self.labels)
        return GaugeMetricFamily(self.name, self.text, labels=self.labels)


class MetricSheet:
    """Collects the numbers of one reading."""

    def __init__(self, families: Sequence[Family]) -> None:
        """Make a sheet of these metrics, without samples."""
        self._metrics = {family: family.empty() for family in families}

    def put(self, family: Family, value: float, *labels: str) -> None:
        """Set the sample of a metric for these values of its labels, which may be set once."""
        metric = self._metrics[family]
        assert isinstance(metric, GaugeMetricFamily | CounterMetricFamily)
        metric.add_metric(labels, value)

    def metrics(self) -> list[Metric]:
        """Return every metric with its samples, also those without any."""
        return list(self._metrics.values())


class StateCollector(Collector):
    """Calls `read` for the present numbers whenever the metrics are asked for."""

    def __init__(self, families: Sequence[Family], read: Callable[[MetricSheet], None]) -> None:
        """Make a collector of these metrics; `read` puts their present samples into a sheet."""
        self._families = families
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Return every metric without samples, so that nothing is measured."""
        return [family.empty() for family in self._families]

    def collect(self) -> Iterable[Metric]:
        """Measure, and return every metric with its present samples; Prometheus's client calls this."""
        sheet = MetricSheet(self._families)
        self._read(sheet)
        return sheet.metrics()


BUILD = Family("millrace_build_info", "1; the labels say which service and release this is.", ("service", "version"))
WAITS_OVERDUE = Family(
    "millrace_waits_overdue",
    "Waits older than their own deadline: who waits is stuck. `millrace run why` names them.",
    ("service", "waits_on"),
)
WAIT_OLDEST = Family(
    "millrace_wait_oldest_seconds",
    "Age of the oldest wait on that component; some, such as an idle trainer's for a run, are ordinary.",
    ("service", "waits_on"),
)
REMOVALS_FAILED = Family(
    "millrace_removals_failed_total",
    "Tries to remove what nobody needs any more (checkpoints, files, directories) that failed; the log names each.",
    ("service", "what"),
)
COMMON = (BUILD, WAITS_OVERDUE, WAIT_OLDEST, REMOVALS_FAILED)


def make_registry(service: str, collectors: Iterable[Collector], *, has_process: bool = True) -> CollectorRegistry:
    """Return the registry of metrics of a service: `collectors`, and what all services export.

    That is waits, release and failed removals, under the label `service`. With `has_process` the process's memory,
    processor time and files are added.
    """
    registry = CollectorRegistry()
    for collector in (common(service), *collectors):
        registry.register(collector)
    if has_process:
        ProcessCollector(registry=registry)
    return registry


def common(service: str) -> StateCollector:
    """Return the collector of the metrics that all services export; `service` is their label."""

    def read(sheet: MetricSheet) -> None:
        """Put the release, the waits by component and the failed removals of this process into the sheet."""
        sheet.put(BUILD, 1, service, __version__)
        # Components without a wait are 0: a series that vanishes would keep an alert at its last value.
        overdue = dict.fromkeys((*_COMPONENTS, OTHER), 0)
        oldest = dict.fromkeys((*_COMPONENTS, OTHER), 0.0)
        for wait in waits.snapshot(service):
            name = component_of(wait.waits_on)
            overdue[name] += wait.is_overdue
            oldest[name] = max(oldest[name], wait.age_s)
        for name in overdue:
            sheet.put(WAITS_OVERDUE, overdue[name], service, name)
            sheet.put(WAIT_OLDEST, oldest[name], service, name)
        for what, count in LEFTOVERS.failures().items():
            sheet.put(REMOVALS_FAILED, count, service, what)

    return StateCollector(COMMON, read)


def component_of(waits_on: str) -> str:
    """Return the kind of component that a wait's `waits_on` names; `other` if it is none.

    Worker ids and addresses of engines are too many for a label.
    """
    if waits_on == "store":
        return "object store"
    if waits_on.startswith(("http://", "https://")):
        return "inference"  # the engine of a play
    for name in _COMPONENTS:
        if waits_on == name or waits_on.startswith((f"{name}-", f"{name} ")):
            return name
    return OTHER
