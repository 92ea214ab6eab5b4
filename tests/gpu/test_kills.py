"""Runs on two GPUs: who gets which, and ranks of a gang that are killed at each point where a trainer may die."""

import contextlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from millrace.local.gpus import assign, machine_gpus
from millrace.telemetry import faults
from millrace.telemetry.faults import Fault, Point
from millrace_testing.trainer.sizes import write_model
from millrace_testing.workplaces import EXAMPLES, Workplace

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

TRAINER, ENGINE = "millrace.trainer.main", "millrace.inference.vllm.server.host"
STEPS = 12
POINTS = [point for point in Point if point.value.startswith("trainer.")]
UPLOADS = (
    Point.TRAINER_BEFORE_UPLOAD,
    Point.TRAINER_MID_UPLOAD,
    Point.TRAINER_BEFORE_MANIFEST,
    Point.TRAINER_AFTER_MANIFEST,
)
"""Those that know a version, and not a step."""


def processes_of(place: Workplace, module: str) -> dict[int, dict[str, str]]:
    """Return what each process that runs a module there was started with, by its id: ranks of a gang, not torchrun.

    A process that was forked shows the environment of the one that it is a copy of.
    """
    found: dict[int, dict[str, str]] = {}
    for process in place.processes():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            raw = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
            if ("-m", module) in pairwise(words) and "torch.distributed.run" not in words:
                found[process.pid] = dict(each.split("=", 1) for each in raw.split("\0") if "=" in each)
    return found


def used(device: int) -> int:
    """Return bytes of a GPU that anybody has taken."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def test_trainer_and_engine_have_a_gpu_each(two_gpus: torch.device, cuda_vllm: str, make_workplace: Any) -> None:
    """3 of the list: `millrace rl` by itself, on the first two GPUs."""
    place: Workplace = make_workplace("two-gpus")
    numbers = machine_gpus()[:2]
    given = assign(numbers, engine_size=1)
    assert {*given["inference"]}.isdisjoint(given["trainer"])
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers)), "MILLRACE_VLLM_PYTHON": cuda_vllm}
    keys = ("--model.name", str(write_model("0.6B", place.path / "model")), "--inference.engine", "vllm")
    loop = ("--orchestrator.batch-size", "32", "--orchestrator.rollouts-per-example", "4", "--max-steps", "3")
    command = ("rl", "@", place.rl_toml, *keys, *loop, "--orchestrator.filter-zero-advantages", "false", "--plain")
    before = [used(0), used(1)]
    with place.following(*command, env=visible) as process:
        place.read_until(process, "step   1/3")
        engines, trainers = processes_of(place, ENGINE), processes_of(place, TRAINER)
        taken = [used(0) - before[0], used(1) - before[1]]
        rest, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, rest[-3000:]
    assert {environ["CUDA_VISIBLE_DEVICES"] for environ in engines.values()} == {str(given["inference"][0])}
    assert len(trainers) == 1
    print(f"taken of the two: {[round(each / 2**30, 1) for each in taken]} GiB")
    assert min(taken) > 2**30, "the engine sees one of the two, so that the trainer is on the other"


@pytest.mark.parametrize("point", POINTS)
def test_a_gang_on_two_gpus_goes_on_when_a_rank_is_killed(
    two_gpus: torch.device, make_workplace: Any, point: Point
) -> None:
    """13 of the list, at each point: the gang restarts as a whole, the run ends well, and its log is clean."""
    place: Workplace = make_workplace(f"kill-{point.value}")
    place.run(str(EXAMPLES / "make_model.py"), "--seed", "0")
    directory = place.path / "faults"
    numbers = list(machine_gpus()[:2])
    keys = ("--model.name", "outputs/reverse-text/base", "--trainer-gpu-ids", json.dumps(numbers))
    loop = ("--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "4", "--ckpt.interval", "2")
    steps = ("--max-steps", str(STEPS), "--orchestrator.eval.interval", str(STEPS))
    more = ("--orchestrator.filter-zero-advantages", "false", "--name", "killed", "--plain")
    with place.following(
        "rl", "@", place.rl_toml, *keys, *loop, *steps, *more, env={faults.VARIABLE: str(directory)}
    ) as process:
        place.read_until(process, f"step   2/{STEPS}")
        ranks = processes_of(place, TRAINER)
        if point == Point.TRAINER_MID_RESUME:  # which only a trainer that was killed comes to
            faults.arm(directory, Fault(point=Point.TRAINER_AFTER_STEP, when={"step": 5}))
        where = "version" if point in UPLOADS else "step"
        struck = faults.arm(directory, Fault(point=point, when={where: 2 if point == Point.TRAINER_MID_RESUME else 4}))
        rest, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, rest[-3000:]
    assert sorted(environ.get("LOCAL_RANK", "") for environ in ranks.values()) == ["0", "1"]
    record = json.loads(struck.read_text())
    assert record["action"] == "kill"
    assert (record["pid"] in ranks) == (point != Point.TRAINER_MID_RESUME), "a rank that had been there before"
    store = (place.path / "outputs" / "killed" / "store").as_uri()
    summary = json.loads((place.path / rest.strip().splitlines()[-1]).read_text())
    assert summary["steps"] == STEPS
    assert "audit clean" in place.millrace("run", "audit", "killed", "--deep", "--store", store)
