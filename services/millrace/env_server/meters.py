"""The env-server's metrics: `play_meters` counts, and what is looked up when Prometheus asks stands here."""

from collections import Counter as Count

from prometheus_client import CollectorRegistry

from millrace.env_server.play_meters import COUNTED, env_label, env_opened
from millrace.env_server.service import EnvService
from millrace.env_server.spool.sink import RolloutSink
from millrace.telemetry.metrics import Family, Sheet, StateCollector, make_registry

ROLLOUTS = Family(
    "millrace_env_server_rollouts",
    "Rollouts that count against the capacity: playing in a worker, queued (for a worker, or behind one), or "
    "unappended (ended, and not in the log yet).",
    ("state",),
)
CAPACITY = Family("millrace_env_server_capacity_rollouts", "Rollouts that it takes at once.")
SPOOL_ROLLOUTS = Family("millrace_env_server_spool_rollouts", "Rollouts that the spool keeps, appended ones included.")
SPOOL_BYTES = Family("millrace_env_server_spool_bytes", "Bytes that the spool keeps.")
SPOOL_LIMIT = Family("millrace_env_server_spool_limit_bytes", "Bytes from which on no new groups are taken.")
QUARANTINED = Family("millrace_env_server_quarantined_tasks", "Tasks that are not played any more.", ("env",))
WORKERS = Family("millrace_env_server_workers", "Loaded env workers that live.", ("env",))
IDLE_WORKERS = Family("millrace_env_server_idle_workers", "Env workers that live and whose environment nobody plays.")
WORKER_MEMORY = Family("millrace_env_server_worker_memory_bytes", "Memory of env workers and their children.", ("env",))
FAMILIES = (
    ROLLOUTS,
    CAPACITY,
    SPOOL_ROLLOUTS,
    SPOOL_BYTES,
    SPOOL_LIMIT,
    QUARANTINED,
    WORKERS,
    IDLE_WORKERS,
    WORKER_MEMORY,
)


def registry_of(service: EnvService, sink: RolloutSink) -> CollectorRegistry:
    """The series that this env-server exports."""

    def read(sheet: Sheet) -> None:
        unappended, playing = sink.num_pending, sum(pool.num_playing for pool in service.pools)
        states = {"playing": playing, "unappended": unappended}
        states["queued"] = max(0, service.num_rollouts - playing - unappended)
        for state, count in states.items():
            sheet.put(ROLLOUTS, count, state)
        sheet.put(CAPACITY, service.capacity)
        sheet.put(SPOOL_ROLLOUTS, sink.spool.num_rollouts)
        sheet.put(SPOOL_BYTES, sink.spool.num_bytes)
        sheet.put(SPOOL_LIMIT, sink.spool.limit_bytes)
        quarantined, workers, memory = Count[str](), Count[str](), Count[str]()
        for pool in service.pools:
            env = env_label(pool.env.label)
            env_opened(env)  # before `COUNTED` is asked, which comes later
            quarantined[env] += len(pool.quarantined_tasks)
            workers[env] += pool.num_workers
            memory[env] += sum(worker.memory_bytes for worker in pool.workers)
        for env in quarantined:
            sheet.put(QUARANTINED, quarantined[env], env)
            sheet.put(WORKERS, workers[env], env)
            sheet.put(WORKER_MEMORY, memory[env], env)
        idle = [pool.num_workers for pool in service.pools if pool.idle_since is not None]
        sheet.put(IDLE_WORKERS, sum(idle))

    return make_registry("env-server", [StateCollector(FAMILIES, read), *COUNTED])
