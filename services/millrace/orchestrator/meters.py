"""The orchestrator's metrics: `run_meters` counts, and what is looked up when Prometheus asks is here.

Series of a run that are looked up are there only while this orchestrator drives it, so that an alert on them ends with
the drive. The time since its last commit is also exported between two drives.
"""

import math
import time
from collections import Counter as Count
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter

from millrace.config import OrchestratorConfig
from millrace.orchestrator.catalog import RunCatalog
from millrace.orchestrator.drive.assembly import RunParts
from millrace.orchestrator.manager import RunManager
from millrace.orchestrator.play.play import PlayState, num_rollouts
from millrace.orchestrator.run_meters import COUNTED, seconds_since, seen
from millrace.orchestrator.tenants import UsageReader
from millrace.orchestrator.workers import QUIET_S, WorkerKind, WorkerRecord, WorkerRegistry
from millrace.runlog.records.run_record import EVAL
from millrace.telemetry.metrics import Family, MetricSheet, StateCollector, make_registry
from millrace.v1 import run_pb2

RUNS = Family("millrace_runs", "Runs of the deployment by state.", ("state",))
LEASE_HELD = Family(
    "millrace_orchestrator_lease_held",
    "1 while this orchestrator may write to the run, 0 while it drives it with a lease that it could not renew.",
    ("run",),
)
STEP = Family("millrace_orchestrator_step", "The batch that is cut next.", ("run",))
SINCE_BATCH = Family(
    "millrace_orchestrator_seconds_since_batch",
    "Seconds since the last commit, or since it became RUNNING, under any orchestrator; absent while no batch is due.",
    ("run",),
)
GROUPS = Family(
    "millrace_orchestrator_groups",
    "Groups on their way: playing at an env-server, unplaced (nobody plays them), finished (whole).",
    ("run", "state"),
)
WAITED_FOR = Family(
    "millrace_orchestrator_groups_waited_for", "Finished groups that the next batch still lacks.", ("run",)
)
FILL = Family(
    "millrace_orchestrator_batch_fill_ratio", "Finished groups, of those that a batch needs (0 to 1).", ("run",)
)
FAILED_SHARE = Family(
    "millrace_orchestrator_failed_rollout_share",
    "Failed rollouts of an environment, of those of the last orchestrator.failure_window groups (0 to 1).",
    ("run", "env"),
)
PUBLISHED = Family("millrace_orchestrator_policy_version_published", "Newest policy version in the log.", ("run",))
LAG = Family(
    "millrace_orchestrator_replica_lag_versions",
    "Published version minus the oldest one that a replica of the run serves.",
    ("run",),
)
REPLICAS = Family(
    "millrace_orchestrator_replicas",
    "Replicas of the run: serving the newest version, behind it, or without one.",
    ("run", "state"),
)
EVENT_QUEUE = Family(
    "millrace_orchestrator_events_queued", "Events that wait for Redis; 1024 hold the run up.", ("run",)
)
WORKERS = Family(
    "millrace_orchestrator_workers",
    "Registered workers: ready, silent (no heartbeat for 5 s) or leaving.",
    ("kind", "state"),
)
GPU_LABELS = ("worker", "gpu")
GPU_UTILIZATION = Family(
    "millrace_orchestrator_gpu_utilization_ratio",
    "Share of the last moments in which a kernel ran on a GPU that a trainer or replica may use (0 to 1); of a trainer "
    "on several machines, those of rank 0.",
    GPU_LABELS,
)
GPU_MEMORY_USED = Family(
    "millrace_orchestrator_gpu_memory_used_bytes", "Memory of such a GPU that all processes use.", GPU_LABELS
)
GPU_MEMORY = Family("millrace_orchestrator_gpu_memory_bytes", "Memory that such a GPU has.", GPU_LABELS)
GPU_POWER = Family("millrace_orchestrator_gpu_power_watts", "Power that such a GPU draws.", GPU_LABELS)
TENANT_ACCELERATORS = Family(
    "millrace_tenant_accelerator_seconds", "Accelerators of a tenant's runs times seconds.", ("tenant",)
)
TENANT_TOKENS = Family(
    "millrace_tenant_tokens", "Tokens of a tenant's committed rollouts: prompt or sampled.", ("tenant", "kind")
)
TENANT_BYTES = Family("millrace_tenant_stored_bytes", "Bytes of a tenant's runs in the object store.", ("tenant",))
STOOD_STILL = Family(
    "millrace_orchestrator_stood_still_seconds_total", "Seconds for which this process itself did not run."
)
FAMILIES = (
    RUNS,
    LEASE_HELD,
    STEP,
    SINCE_BATCH,
    FAILED_SHARE,
    GROUPS,
    WAITED_FOR,
    FILL,
    PUBLISHED,
    LAG,
    REPLICAS,
    EVENT_QUEUE,
    WORKERS,
    GPU_UTILIZATION,
    GPU_MEMORY_USED,
    GPU_MEMORY,
    GPU_POWER,
    TENANT_ACCELERATORS,
    TENANT_TOKENS,
    TENANT_BYTES,
    STOOD_STILL,
)
LOST = Counter(
    "millrace_orchestrator_workers_lost_total",
    "Workers that fell silent (WORKER_LOST) or that another process replaced (WORKER_REPLACED).",
    ["kind", "reason"],
    registry=None,
)
for _kind in WorkerKind:
    for _reason in ("WORKER_LOST", "WORKER_REPLACED"):
        LOST.labels(_kind, _reason)  # 0 from the beginning: `increase` sees the first one


def registry_of(
    manager: RunManager, catalog: RunCatalog, workers: WorkerRegistry, usage: UsageReader
) -> CollectorRegistry:
    """Return the registry of metrics that this orchestrator exports, and begin to count lost workers."""

    def read(sheet: MetricSheet) -> None:
        """Put the values that are looked up when Prometheus asks into the sheet."""
        _read_runs(sheet, catalog)
        _read_workers(sheet, workers)
        _read_tenants(sheet, usage)
        driven = manager.driven()
        _read_open(sheet, catalog, driven={parts.context.record.name for parts, _ in driven})
        for parts, may_write in driven:
            sheet.put(LEASE_HELD, may_write, parts.context.record.name)
            if parts.training is not None:
                _read_training(sheet, parts, parts.training.orchestrator)

    workers.on_lost.append(_count_lost)
    return make_registry("orchestrator", [StateCollector(FAMILIES, read), *COUNTED, LOST])


def _read_runs(sheet: MetricSheet, catalog: RunCatalog) -> None:
    """Put the number of runs in each state into the sheet."""
    states = Count(int(view.run.state) for view in catalog.views)
    for name, state in run_pb2.RunState.items():
        if state != run_pb2.RUN_STATE_UNSPECIFIED:
            sheet.put(RUNS, states[state], name.removeprefix("RUN_STATE_").lower())


def _read_tenants(sheet: MetricSheet, usage: UsageReader) -> None:
    """Put into the sheet what the runs of every tenant had used when all were read; nothing without tenants."""
    for tenant, used in usage.totals.items():
        if not tenant:
            continue
        sheet.put(TENANT_ACCELERATORS, used.accelerator_seconds, tenant)
        sheet.put(TENANT_TOKENS, used.prompt_tokens, tenant, "prompt")
        sheet.put(TENANT_TOKENS, used.sampled_tokens, tenant, "sampled")
        sheet.put(TENANT_BYTES, used.stored_bytes, tenant)


def _read_open(sheet: MetricSheet, catalog: RunCatalog, *, driven: Collection[str]) -> None:
    """Put the time since its last batch into the sheet for each open run that is not in `driven`, by name.

    Also begins the counters of every open run.
    """
    for view in catalog.views:
        run, moved = view.record.name, view.status.batches.moved
        if not view.is_terminal:
            # Creates the counters of the run, which this scrape reads after the gauges.
            seen(run)
            if moved is not None and run not in driven and view.record.kind != EVAL:
                sheet.put(SINCE_BATCH, seconds_since(moved), run)


def _read_workers(sheet: MetricSheet, workers: WorkerRegistry) -> None:
    """Put the number of workers by kind and state, the use of their GPUs, and this process's standstills into the
    sheet.
    """
    now = time.monotonic()
    found = Count(
        (
            record.kind,
            "leaving" if record.is_leaving else "silent" if now - record.silent_since > QUIET_S else "ready",
        )
        for record in workers.records()
    )
    for kind in WorkerKind:
        for state in ("ready", "silent", "leaving"):
            sheet.put(WORKERS, found[kind, state], kind, state)
    names = workers.names()
    for record in workers.records():
        for gpu in record.gpus:
            for family, value in (
                (GPU_UTILIZATION, gpu.utilization),
                (GPU_MEMORY_USED, gpu.memory_used),
                (GPU_MEMORY, gpu.memory_total),
                (GPU_POWER, gpu.power_watts),
            ):
                if value is not None:
                    sheet.put(family, value, names[record.worker_id], str(gpu.index))
    sheet.put(STOOD_STILL, workers.stood_still_s)


def _read_training(sheet: MetricSheet, parts: RunParts, settings: OrchestratorConfig) -> None:
    """Put step, groups, failed shares and replicas of a training run that is driven here into the sheet."""
    run, book = parts.context.record.name, parts.book
    sheet.put(STEP, book.step, run)
    sheet.put(EVENT_QUEUE, parts.context.events.num_queued, run)
    since = parts.context.events.meters.seconds_since_batch
    if since is not None and book.step < parts.max_steps:
        sheet.put(SINCE_BATCH, since, run)
    need = settings.batch_size
    states = Count(play.state for play in book.plays.values())
    have = num_rollouts(play for play in book.plays.values() if play.state is PlayState.WHOLE)
    for state, count in (
        ("playing", states[PlayState.PLACED]),
        ("unplaced", states[PlayState.UNPLACED]),
        ("finished", states[PlayState.WHOLE]),
    ):
        sheet.put(GROUPS, count, run, state)
    # By the largest group, because it is not known which groups will be the missing ones.
    sheet.put(WAITED_FOR, math.ceil(max(0, need - have) / max(settings.group_sizes.values())), run)
    sheet.put(FILL, min(1.0, have / need), run)
    shares = {env.name: 0.0 for env in settings.env}
    shares |= {count.env: count.recent_share for count in parts.failures.environments()}
    for env, share in shares.items():
        sheet.put(FAILED_SHARE, share, run, env)
    _read_replicas(sheet, parts)


def _read_replicas(sheet: MetricSheet, parts: RunParts) -> None:
    """Put into the sheet which policy versions the run's replicas serve, and how far that is from the newest one."""
    run, desired = parts.context.record.name, parts.policies.desired
    versions = [replica.version for replica in parts.policies.ready()]
    newest = desired.version if desired is not None else max(versions, default=0)
    num_serving = sum(1 for version in versions if version >= newest)
    without = max(0, len(parts.policies.known()) - len(versions))
    states = (("serving", num_serving), ("behind", len(versions) - num_serving), ("without", without))
    for state, count in states:
        sheet.put(REPLICAS, count, run, state)
    if desired is not None:
        sheet.put(PUBLISHED, desired.version, run)
    if versions:
        sheet.put(LAG, max(0, newest - min(versions)), run)


def _count_lost(record: WorkerRecord, reason: str) -> None:
    """Count a worker that is gone, by its kind and the reason."""
    LOST.labels(record.kind, reason).inc()
