"""Two ranks (FSDP 2) with each key for memory learn what they learn without it, and resume with the same bits."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace_testing.trainer.equality import (
    LIMITS,
    SAVED,
    difference,
    facts_of,
    job_of,
    make_model,
    policy_of,
    run_jobs,
)

_OPTIM = {"lr": 1e-3, "max_norm": 0.5}
_EXACT: dict[str, dict[str, Any]] = {
    "every other block is computed again": {"model": {"ac": {"freq": 2}}},
    "what is cheap is computed again": {"model": {"ac": {"mode": "selective"}}},
    "parameters on the host": {"model": {"fsdp_cpu_offload": True}},
    "state on the host": {"model": {"optim_cpu_offload": True}},
    "parameters stay": {"model": {"reshard_after_forward": False}},
}
"""What changes where numbers are and when, and no number; an order of sums at most."""
_ROUNDED: dict[str, dict[str, Any]] = {
    "gradients are summed in bfloat16": {"model": {"reduce_dtype": "bfloat16"}},
    "state in bfloat16": {"optim": {**_OPTIM, "state_dtype": "bfloat16"}},
}
"""What rounds to eight bits."""
_EXACT_LIMIT = 1e-5
_ROUNDED_LIMITS = {"gradients are summed in bfloat16": 0.03, "state in bfloat16": 0.006}
"""How far the way of all weights may be from the one without, in parts of that way.

A number in bfloat16 is off by 2^-9 of itself at most, and AdamW's step is as large where a gradient is nearly zero as
elsewhere, and then its sign may follow from rounding. Moments are rounded by chance, which evens out over weights.
"""


def _jobs(model: Path, kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return five steps with each key; and two, a checkpoint, and the other three from there."""
    work: dict[str, dict[str, Any]] = {}
    for kind, changes in kinds.items():
        whole = job_of(model, {}, run=_name(kind), **changes)
        work[_name(kind)] = whole
        work[f"{_name(kind)}-short"] = {**whole, "last": SAVED, "saves": True}
        work[f"{_name(kind)}-then"] = {**whole, "first": SAVED}
    return work


def _name(kind: str) -> str:
    return kind.replace(" ", "-")


def _way(output: Path, start: Path) -> np.ndarray:
    """Return what the steps have added to the weights."""
    begun = policy_of(start)
    return np.concatenate([values - begun[name] for name, values in sorted(policy_of(output).items())])


def _require_equal(output: Path, plain: Path) -> None:
    """Loss, gradient norm and policy are those of another."""
    assert difference(output, plain) <= _EXACT_LIMIT, output.name
    found, wanted = facts_of(output), facts_of(plain)
    assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)


def _require_resumed(output: Path) -> None:
    """The steps after a checkpoint give the bits of those that did not stop."""
    whole, resumed = policy_of(output), policy_of(output.with_name(f"{output.name}-then"))
    assert whole.keys() == resumed.keys()
    for name, values in whole.items():
        assert np.array_equal(values, resumed[name]), f"{name} of {output.name}"
    assert facts_of(output)["loss"][SAVED:] == facts_of(output.with_name(f"{output.name}-then"))["loss"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ranks_with_a_key_for_memory_learn_what_they_learn_without(tmp_path: Path) -> None:
    model, jobs = make_model("dense", tmp_path), tmp_path / "jobs"
    start = {"start": {**job_of(model, {}), "last": 0}}
    run_jobs(jobs, start | _jobs(model, {"plain": {}, **_EXACT, **_ROUNDED}), world_size=2)
    plain = jobs / "plain"
    assert difference(plain, jobs / "start") > 100 * _EXACT_LIMIT
    for kind in _EXACT:
        _require_equal(jobs / _name(kind), plain)
    way = _way(plain, jobs / "start")
    for kind, limit in _ROUNDED_LIMITS.items():
        off = np.linalg.norm(_way(jobs / _name(kind), jobs / "start") - way) / np.linalg.norm(way)
        assert 0 < off <= limit, f"{kind}: {off}"
    for kind in ("plain", *_EXACT, *_ROUNDED):
        _require_resumed(jobs / _name(kind))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_with_compiled_blocks_learn_what_they_learn_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    model, jobs = make_model("dense", tmp_path), tmp_path / "jobs"
    run_jobs(jobs, _jobs(model, {"plain": {}, "compiled": {"model": {"compile": {}}}}), world_size=2)
    assert not facts_of(jobs / "compiled")["uncompiled"]
    assert sum(facts_of(path.with_suffix(""))["graphs"] for path in jobs.glob("compiled*.facts")), (
        "by whoever came first"
    )
    _require_equal(jobs / "compiled", jobs / "plain")
    _require_resumed(jobs / "compiled")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ac", ["", "full"])
def test_two_ranks_that_share_rows_and_experts_learn_the_same_with_compiled_blocks(
    ac: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one rank does without; a part of a block is compiled, its exchanges are not."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    model, jobs = make_model("moe", tmp_path), tmp_path / "jobs"
    keys = {"compile": {}, **({"ac": {"mode": ac}} if ac else {})}
    run_jobs(jobs, {"one": job_of(model, {})}, world_size=1)
    layouts: dict[str, dict[str, int]] = {"cp-ep": {"cp": 2, "ep": 2}}
    if not ac:
        layouts |= {"cp": {"cp": 2}, "ep": {"ep": 2}}
    work = {name: job_of(model, layout, model=keys) for name, layout in layouts.items()}
    run_jobs(jobs, work, world_size=2)
    for name in work:
        facts, off = facts_of(jobs / name), difference(jobs / name, jobs / "one")
        print(f"{name} {ac}: {off:.1e}, {facts['graphs']} graphs")
        assert not facts["uncompiled"] and facts["graphs"]
        for each in ("loss", "grad_norm"):
            assert facts[each] == pytest.approx(facts_of(jobs / "one")[each], rel=1e-5, abs=1e-6)
        assert off <= LIMITS["adamw"]
