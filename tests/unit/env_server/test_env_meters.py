"""What Prometheus hears of an env-server's workers."""

from types import SimpleNamespace

from millrace.env_server import play_meters, run
from millrace.internal.v1.play_pb2 import EnvSpec


def test_deaths_of_workers_are_counted_from_0() -> None:
    """A first burst of deaths is seen as a rise only if the series was there before."""
    env = EnvSpec(name="new-here", id="some-env")
    pool = SimpleNamespace(env=env, num_playing=0, quarantined_tasks=(), num_workers=1, idle_since=None)
    pool.workers = [SimpleNamespace(memory_bytes=5)]
    service = SimpleNamespace(pools=[pool], num_rollouts=0, capacity=1)
    sink = SimpleNamespace(num_pending=0, spool=SimpleNamespace(num_rollouts=0, num_bytes=0, limit_bytes=1))
    exported = run.registry_of(service, sink)  # type: ignore[arg-type]
    first = {metric.name: metric for metric in exported.collect()}  # one look: what a scrape gets
    samples = first["millrace_env_server_worker_deaths"].samples
    assert [s.value for s in samples if s.labels == {"env": "new-here"} and s.name.endswith("_total")] == [0.0]
    play_meters.worker_died("new-here")
    assert exported.get_sample_value("millrace_env_server_worker_deaths_total", {"env": "new-here"}) == 1
