"""Gangs whose ranks share layers, rows or experts: killed rank by rank, and over two machines."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from millrace.local.directory import free_port
from millrace.policies.fetch import prove_policies
from millrace.readers.audit import Depth, audit_run
from millrace.telemetry import faults
from millrace.telemetry.faults import Fault, Point
from millrace.trainer.checkpoint.index import differences
from millrace_testing.model_files import write_tokenizer
from millrace_testing.trainer.equality import LAYOUTS, make_model

Recorder = Any  # conftest.Recorder; tests are not importable from one another

KILLED = ("FSDP 2", "TP 2", "CP 2", "EP 2", "HSDP 2x2", "FSDP 2 x TP 2", "FSDP 2 x CP 2", "FSDP 2 x EP 2")
STEPS = 5


def _gang(recorder: Recorder, *torchrun: str, store_url: str = "") -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "millrace_testing.trainer.gang_rank"]
    return [*command, recorder.redis_url, store_url or recorder.store_url, recorder.prefix, recorder.uid, ""]


def _environ(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def _train(recorder: Recorder, *, world_size: int, faults_of_ranks: Path) -> None:
    """A gang that is started again as often as one of its ranks is to die."""
    alone = ("--standalone", "--local-addr=127.0.0.1")  # this machine's name need not resolve
    restarts = (f"--max-restarts={world_size}", "--monitor-interval=0.1")
    command = _gang(recorder, *alone, f"--nproc-per-node={world_size}", *restarts)
    environ = _environ(FAULTS_OF_RANKS=str(faults_of_ranks))
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stderr[-4000:]


def _require_clean(recorder: Recorder) -> None:
    depth = Depth(is_deep=True, prove=prove_policies, compare=differences)
    audit = audit_run(recorder.log.redis, recorder.store, prefix=recorder.prefix, uid=recorder.uid, depth=depth)
    ours = ("POLICY", "CHECKPOINT", "EVENT", "STEP", "HEADER", "CHAIN")
    assert not [each for each in recorder.call(audit).violations if each.check.startswith(ours)]


def _config(make_config: Any, model: Path, layout: Mapping[str, int]) -> Any:
    keys = {"model": {"seq_len": 32, **layout}, "ckpt": {"interval": 2}, "determinism": "strict"}
    return make_config(name=str(model), max_steps=STEPS, optim={"lr": 0.01}, micro_batch_tokens=48, **keys)


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.parametrize("layout", KILLED)
def test_each_rank_is_killed_once_and_the_policies_are_the_same(
    layout: str, new_recorder: Callable[[], Recorder], make_config: Any, tmp_path: Path
) -> None:
    """Ranks die in the backward of a step each; the gang restarts as a whole, and the bits are those of no kill."""
    world_size, keys = LAYOUTS[layout]
    model = make_model("moe" if "EP" in layout else "dense", tmp_path)
    write_tokenizer(model, num_tokens=16)
    unbroken, killed = new_recorder(), new_recorder()
    for recorder in (unbroken, killed):
        recorder.record(_config(make_config, model, keys), steps=STEPS)
    _train(unbroken, world_size=world_size, faults_of_ranks=tmp_path / "none")
    struck = []
    for rank in range(world_size):
        fault = Fault(point=Point.TRAINER_MID_BACKWARD, when={"step": rank + 1})
        struck.append(faults.arm(tmp_path / "faults" / str(rank), fault))
    _train(killed, world_size=world_size, faults_of_ranks=tmp_path / "faults")
    assert all(path.exists() for path in struck), "every rank was killed"
    assert len(set(killed.digests().values())) == STEPS + 1
    assert killed.digests() == unbroken.digests()
    _require_clean(killed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_machines_that_share_no_files_train_one_model(
    recorder: Recorder, s3_store: Any, s3_endpoint: str, make_config: Any, tmp_path: Path
) -> None:
    """Two torchruns, as the chart starts them, each with a model, a directory and scratch space of its own."""
    recorder.store = s3_store
    machines = [tmp_path / "first", tmp_path / "second"]
    for machine in machines:
        write_tokenizer(make_model("dense", machine), num_tokens=16)
    config = _config(make_config, Path("dense"), {"cp": 2, "tp": 2})
    recorder.record(config, steps=STEPS)
    store_url = f"{recorder.store_url}?endpoint={s3_endpoint}&region=us-east-1"
    port, started = free_port(), []
    for number, machine in enumerate(machines):
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-id={recorder.uid}", f"--rdzv-endpoint=127.0.0.1:{port}")
        host = f"--rdzv-conf=is_host={str(number == 0).lower()},join_timeout=120,read_timeout=60"
        nodes = ("--nnodes=2", "--nproc-per-node=2", "--local-addr=127.0.0.1")
        command = _gang(recorder, *nodes, *rendezvous, host, store_url=store_url)
        own = {"MILLRACE_SCRATCH_DIR": str(machine / "scratch"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        log = (machine / "log").open("wb")
        started.append(
            subprocess.Popen(command, env=_environ(**own), cwd=machine, stdout=log, stderr=log, start_new_session=True)
        )
    try:
        for process, machine in zip(started, machines, strict=True):
            assert process.wait(600) == 0, (machine / "log").read_text(errors="replace")[-4000:]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert len(set(recorder.digests().values())) == STEPS + 1
    assert recorder.checkpoints() == [2, 4, 5]
    _require_clean(recorder)
