"""Whole runs on a GPU: trainer and vLLM beside each other, within the plan, and restarted."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config.sections.trainer import TrainerConfig
from millrace.local.gpus import SHARED_UTILIZATION
from millrace.trainer.estimate_step import simulate
from millrace_testing.trainer.equality import make_model
from millrace_testing.trainer.sizes import config_of, write_model
from millrace_testing.workplaces import Workplace

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3000)]

GIB = 2**30
RESERVE = 4 * GIB
NODES = ("MILLRACE_NODES", "MILLRACE_NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
MISMATCH = {"auto": 1e-3, "fp8": 5e-2}
"""Most mismatch_kl of a policy between trainer and engine, by what the engine computes in."""
DIGEST = """
import os, sys
from pathlib import Path
from millrace.config.sections.rl import TrainerBench
from millrace.custom_code import CustomCode
from millrace.trainer.bench import fake_batch, fake_samples
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout
from millrace.trainer.learning.learner import Learner
from millrace.trainer.loop import learn
bench, gang = TrainerBench.model_validate_json(sys.argv[1]), Gang.join()
at = Path(bench.trainer.model.name)
learner = Learner.of_start_model(bench, gang=gang, directory=at, start_directory=at, code=CustomCode())
layout = BatchLayout.of(learner.config, learner.packing)
for step in range(3):
    batch = fake_batch(fake_samples(bench.data, step=step, seed=0, vocabulary=64), step=step, layout=layout, gang=gang)
    learned = learn(learner, batch)
    if gang.is_leader:
        print("loss", learned.metrics.values()["loss/mean"], flush=True)
gang.leave()
"""


@contextmanager
def used_at_most(device: torch.device) -> Iterator[Callable[[], int]]:
    """In this block the device is watched; gives what says how many of its bytes were used at most, by anybody."""
    over, most = threading.Event(), 0

    def watch() -> None:
        nonlocal most
        while not over.wait(0.05):
            free, total = torch.cuda.mem_get_info(device)
            most = max(most, total - free)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: most
    finally:
        over.set()
        watcher.join()


def run_of(place: Workplace, size: str, *more: str) -> tuple[str, ...]:
    """Return keys of a short run of a model of this size on vLLM, in which random rewards do not matter."""
    model = write_model(size, place.path / size)
    keys = ("--model.name", str(model), "--inference.engine", "vllm", "--trainer.scheduler.warmup-steps", "0")
    loop = ("--orchestrator.batch-size", "32", "--orchestrator.rollouts-per-example", "4")
    return (*keys, *loop, "--orchestrator.filter-zero-advantages", "false", *more)


@pytest.mark.parametrize(("size", "engine"), [("0.6B", "auto"), ("0.6B", "fp8"), ("4B", "auto"), ("8B", "auto")])
def test_a_run_stays_below_its_plan_and_engine_and_trainer_agree(
    gpu: torch.device, cuda_vllm: str, make_workplace: Any, size: str, engine: str
) -> None:
    """2 and 5 of the list: three steps beside vLLM on one GPU, or on as many as there are."""
    place: Workplace = make_workplace(f"gpu-{size}-{engine}")
    total = torch.cuda.mem_get_info(gpu)[1]
    ranks = max(1, torch.cuda.device_count() - 1)
    is_shared = torch.cuda.device_count() == 1
    trainer = TrainerConfig.model_validate({"model": {"name": "x", "seq_len": 64}, "micro_batch_tokens": 8192})
    planned = simulate(trainer, config_of(size), num_gpus=ranks).peak + RESERVE
    engine_share = SHARED_UTILIZATION if is_shared else 0.0
    if planned + engine_share * total > total:
        pytest.skip(f"{size} does not fit: {planned / GIB:.0f} GiB are planned for the trainer of {ranks} ranks")
    more = () if engine == "auto" else ("--inference.vllm", '{"quantization": "fp8"}')
    steps = ("--max-steps", "3", "--orchestrator.eval.interval", "3")
    trainers = gpu if is_shared else torch.device("cuda", torch.cuda.device_count() - 1)
    with used_at_most(trainers) as peak:
        summary, output = place.train(
            *run_of(place, size, *steps, *more), env={"MILLRACE_VLLM_PYTHON": cuda_vllm}, timeout_s=2400
        )
    print(output)  # into the report of `make gpu`
    assert summary["steps"] == 3, output[-3000:]
    assert peak() <= planned + engine_share * total
    assert summary["mismatch_kl"] <= MISMATCH[engine]


def test_vllm_sleeps_beside_every_step_and_has_its_memory_again_behind_it(
    gpu: torch.device, cuda_vllm: str, make_workplace: Any
) -> None:
    place: Workplace = make_workplace("gpu-sleep")
    total = torch.cuda.mem_get_info(gpu)[1]
    devices = ("--inference-gpu-ids", "[0]", "--trainer-gpu-ids", "[0]")
    turns = ("--async-level", "0", "--inference.sleep-while-training", "true", "--max-steps", "3")
    turns += ("--orchestrator.eval.interval", "3")  # whose last one is scored by the trainer
    with used_at_most(gpu) as peak:
        summary, output = place.train(
            *run_of(place, "0.6B", *devices, *turns), env={"MILLRACE_VLLM_PYTHON": cuda_vllm}, timeout_s=2400
        )
    print(output)
    assert summary["steps"] == 3 and summary["mismatch_kl"] <= MISMATCH["auto"], output[-3000:]
    [log] = place.path.rglob("logs/inference.log")
    freed = [float(found) for found in re.findall(r"Sleep mode freed ([\d.]+) GiB", log.read_text())]
    assert len(freed) >= 4, "before each step, and before the last evaluation is scored"
    assert min(freed) * GIB > SHARED_UTILIZATION * total, "it had more than it gets where both have memory"
    assert peak() <= total - GIB


def test_a_trainer_that_dies_goes_on_in_a_new_lineage_and_the_engine_serves_it_in_place(
    gpu: torch.device, cuda_vllm: str, make_workplace: Any
) -> None:
    """16 of the list."""
    place: Workplace = make_workplace("gpu-restart")
    keys = run_of(place, "0.6B", "--max-steps", "8", "--trainer.determinism", "best_effort", "--ckpt.interval", "3")
    command = ("rl", "@", place.rl_toml, *keys, "--name", "again", "--plain")
    with place.following(*command, env={"MILLRACE_VLLM_PYTHON": cuda_vllm}) as process:
        place.read_until(process, "step   4/8")
        (trainer,) = [each for each in place.processes() if "millrace.trainer.main" in " ".join(each.cmdline())]
        engines = {each.pid for each in place.processes() if "vllm.server.host" in " ".join(each.cmdline())}
        trainer.send_signal(signal.SIGKILL)
        seen = place.read_until(process, "step   7/8")
        still = {each.pid for each in place.processes() if "vllm.server.host" in " ".join(each.cmdline())}
        rest, _ = process.communicate(timeout=900)
    assert process.returncode == 0, rest[-3000:]
    assert "NEW_LINEAGE" in seen and "lineage 1" in seen
    assert engines and engines <= still, "the engine was not started again"


def test_two_machines_learn_what_one_process_learns(two_gpus: torch.device, tmp_path: Path) -> None:
    """20 of the list. Run it on both machines at the same time, with the address of the first one on either."""
    if missing := [name for name in NODES if name not in os.environ]:
        pytest.skip(f"needs two machines: set {', '.join(missing)} on each (2, 0 or 1, and the first one's address)")
    directory = make_model("dense", tmp_path)
    bench = {
        "trainer": {"model": {"name": str(directory), "seq_len": 32, "dtype": "float32"}, "micro_batch_tokens": 256},
        "data": {"type": "variable", "batch_size": 32, "seq_len": 32},
    }
    asked = [sys.executable, "-c", DIGEST, json.dumps(bench)]
    count = torch.cuda.device_count()
    places = [f"--nnodes={os.environ['MILLRACE_NODES']}", f"--node-rank={os.environ['MILLRACE_NODE_RANK']}"]
    places += [f"--master-addr={os.environ['MASTER_ADDR']}", f"--master-port={os.environ['MASTER_PORT']}"]
    gang = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", *places, "--no-python", *asked]
    began = time.monotonic()
    environ = os.environ | {"NCCL_DEBUG": "INFO"}
    together = subprocess.run(gang, capture_output=True, text=True, timeout=1200, env=environ)
    assert together.returncode == 0, together.stderr[-3000:]
    print(f"{time.monotonic() - began:.0f} s; {set(re.findall(r'NET/(?:IB|Socket)', together.stdout))}")
    assert "NET/IB" in together.stdout, "the machines talk over sockets, not over RDMA"
    if os.environ["MILLRACE_NODE_RANK"] == "0":
        alone = subprocess.run(asked, capture_output=True, text=True, timeout=600)
        assert alone.returncode == 0, alone.stderr[-3000:]
        assert losses(together.stdout) == pytest.approx(losses(alone.stdout), rel=1e-4)


def losses(output: str) -> list[float]:
    """Of the three steps, as rank 0 has printed them."""
    found = [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss ")]
    assert len(found) == 3, output[-2000:]
    return found
