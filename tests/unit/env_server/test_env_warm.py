"""Which idle environments keep their workers."""

from types import SimpleNamespace
from typing import Any

from millrace.env_server.run import WarmLimits, to_rest

LIMITS = WarmLimits(idle_s=600.0, num_workers=4)


def pool(name: str, *, idle_since: float | None, workers: int = 1, runs: tuple[str, ...] = (), **more: Any) -> Any:
    values = {"is_resting": False, "failure": None, **more}
    return SimpleNamespace(name=name, idle_since=idle_since, num_workers=workers, runs=set(runs), **values)


def resting(pools: list[Any], *, now: float, live: tuple[str, ...] = ()) -> list[str]:
    return sorted(one.name for one in to_rest(pools, live_runs=live, now=now, limits=LIMITS))


def test_the_environments_of_ended_runs_keep_few_workers() -> None:
    """18 runs, each with an environment of its own, ended one after the other."""
    pools = [pool(f"e{n:02}", idle_since=float(n), runs=(f"r{n}",)) for n in range(18)]
    assert resting(pools, now=20.0) == [f"e{n:02}" for n in range(14)], "the four that were used last stay"


def test_what_a_live_run_plays_stays_beside_them() -> None:
    pools = [pool(f"e{n}", idle_since=float(n), runs=("live",)) for n in range(9)]
    assert resting(pools, now=20.0, live=("live",)) == []
    assert resting(pools, now=20.0) == ["e0", "e1", "e2", "e3", "e4"]


def test_idle_for_too_long_busy_resting_and_failed() -> None:
    pools = [
        pool("old", idle_since=0.0, runs=("live",)),
        pool("busy", idle_since=None),
        pool("resting", idle_since=0.0, is_resting=True),
        pool("fresh", idle_since=500.0),
        pool("failed", idle_since=500.0, failure=RuntimeError()),
    ]
    assert resting(pools, now=601.0, live=("live",)) == ["failed", "old"]


def test_an_environment_with_more_workers_than_may_be_kept_does_not_push_others_out() -> None:
    pools = [pool("wide", idle_since=9.0, workers=5), pool("small", idle_since=1.0, workers=4)]
    assert resting(pools, now=20.0) == ["wide"]
