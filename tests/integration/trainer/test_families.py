"""Ranks that share layers or rows learn what one rank learns, in every family that they are allowed for."""

from pathlib import Path
from typing import Any

import pytest

from millrace.trainer.model import context_parallel, fit
from millrace_testing.trainer.equality import difference, facts_of, job_of, run_jobs
from millrace_testing.trainer.families import EXPERTS, FAMILIES, make_family, make_named

_SGD = {"optim": {"type": "sgd", "lr": 0.1, "max_norm": 0.5}}
"""AdamW makes whole steps of gradients that are zero but for rounding, as those of the biases of keys are."""
_LIMIT = 1e-5
_LAYOUTS = {"tp": fit.PROVED, "cp": context_parallel.PROVED}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_learn_what_one_learns_in_every_family(tmp_path: Path) -> None:
    models = {family: make_family(family, tmp_path) for family in FAMILIES}
    jobs = tmp_path / "jobs"
    run_jobs(jobs, {f"{family}-one": job_of(model, {}, **_SGD) for family, model in models.items()}, world_size=1)
    shared = {(family, key): job_of(models[family], {key: 2}, **_SGD) for key in _LAYOUTS for family in _LAYOUTS[key]}
    run_jobs(jobs, {f"{family}-{key}": job for (family, key), job in shared.items()}, world_size=2)
    bad: list[str] = []
    for family, key in shared:
        one, two = jobs / f"{family}-one", jobs / f"{family}-{key}"
        found, wanted = facts_of(two), facts_of(one)
        off = difference(two, one)
        print(family, key, off)
        are_equal = all(
            found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6) for name in ("loss", "grad_norm")
        )
        bad += [] if are_equal and off <= _LIMIT else [f"{family} with {key} 2: {off}"]
    assert not bad
    assert set().union(*_LAYOUTS.values()) == FAMILIES.keys()


_WIDER = {"gpt_oss": {"dp_replicate": 2, "ep": 2}, "nemotron_h": {"ep": 2}, "deepseek_v3, experts": {"ep": 4}}
"""Four ranks, for biases of experts, experts without gates, and a correction bias."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_share_experts_learn_what_one_learns_in_every_family(tmp_path: Path) -> None:
    """Rows hold several samples where the family keeps them apart."""
    changes: dict[str, Any] = {**_SGD, "pack": {"mode": "auto"}}
    models = {name: make_named(name, tmp_path / "models") for name in EXPERTS}
    jobs = tmp_path / "jobs"
    run_jobs(jobs, {f"{name} one": job_of(model, {}, **changes) for name, model in models.items()}, world_size=1)
    for count, layouts in ((2, {name: {"ep": 2} for name in EXPERTS}), (4, _WIDER)):
        work = {f"{name} {count}": job_of(models[name], keys, **changes) for name, keys in layouts.items()}
        run_jobs(jobs, work, world_size=count)
    bad: list[str] = []
    for name, count in [*((name, 2) for name in EXPERTS), *((name, 4) for name in _WIDER)]:
        one, shared = jobs / f"{name} one", jobs / f"{name} {count}"
        found, wanted, off = facts_of(shared), facts_of(one), difference(shared, one)
        print(f"{name}, {count} ranks: {off:.1e}")
        are_equal = all(
            found[each] == pytest.approx(wanted[each], rel=1e-5, abs=1e-6) for each in ("loss", "grad_norm")
        )
        bad += [] if are_equal and off <= _LIMIT else [f"{name} on {count} ranks: {off}, {found} instead of {wanted}"]
        assert max(wanted["grad_norm"]) > 0.5, "gradients are clipped"
    assert not bad
