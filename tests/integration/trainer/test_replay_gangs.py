"""Ranks of a gang that replay experts learn what one process learns, which is not what free routers learn."""

from pathlib import Path
from typing import Any

import pytest

from millrace_testing.trainer.equality import difference, facts_of, job_of, run_jobs
from millrace_testing.trainer.families import make_named

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

_SGD: dict[str, Any] = {"optim": {"type": "sgd", "lr": 0.1, "max_norm": 0.5}, "pack": {"mode": "auto"}}


def _replaying(model: Path) -> dict[str, Any]:
    job = job_of(model, {}, **_SGD, model={"moe": {"replay": True}})
    job["config"]["inference"] = {"return_routed_experts": True}
    return job


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3, experts"])
def test_two_data_parallel_ranks_replay_the_experts_of_their_own_samples(name: str, tmp_path: Path) -> None:
    model, jobs = make_named(name, tmp_path / "model"), tmp_path / "jobs"
    alone = {"free": job_of(model, {}, **_SGD), "one": _replaying(model)}
    run_jobs(jobs, alone, world_size=1)
    run_jobs(jobs, {"two": _replaying(model)}, world_size=2)
    found, wanted = facts_of(jobs / "two"), facts_of(jobs / "one")
    for fact in ("loss", "grad_norm"):
        assert found[fact] == pytest.approx(wanted[fact], rel=1e-5, abs=1e-6)
    assert difference(jobs / "two", jobs / "one") <= 1e-5
    assert difference(jobs / "free", jobs / "one") > 1e-3
