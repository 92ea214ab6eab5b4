"""Steps on GPUs: what they compute, what they hold, and what leaves them."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from millrace.config.sections.rl import TrainerBench
from millrace.config.sections.trainer import OptimConfig, SchedulerConfig
from millrace.custom_code import CustomCode
from millrace.device_digest import device_digest, torch_digest
from millrace.inference.vllm.workers.layout import Region, Slot, Write
from millrace.internal.v1 import policy_pb2
from millrace.local.directory import free_port
from millrace.policies.digest import bits_digest
from millrace.runlog import Names
from millrace.storage.local import LocalStore
from millrace.trainer.bench import BenchStep, fake_batch, fake_samples, measure
from millrace.trainer.estimate_step import simulate
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout, build_micro_batch, fake_sample
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.optimizer import PolicyOptimizer
from millrace.trainer.loop import learn
from millrace.trainer.model.context_parallel import use_varlen_kernel
from millrace.trainer.model.mesh import RankLayout
from millrace.trainer.model.published import Snapshots
from millrace.trainer.publish.plan import PublishPlan, PublishTarget
from millrace.trainer.publish.publisher import Publisher
from millrace.v1 import event_pb2
from millrace_testing.trainer.equality import LAYOUTS, compare, make_model, table
from millrace_testing.trainer.sizes import config_of, write_model

pytestmark = pytest.mark.gpu
STEPS = """
import json, sys
from pathlib import Path
from millrace.config.sections.rl import TrainerBench
from millrace.custom_code import CustomCode
from millrace.device_digest import device_digest
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
    samples = fake_samples(bench.data, step=step, seed=0, vocabulary=64)
    learn(learner, fake_batch(samples, step=step, layout=layout, gang=gang))
print(json.dumps([device_digest(each.full_tensor()) for each in learner.model.parameters()]))
"""
DEVICES = """
from millrace.trainer.gang.distributed import Gang
gang = Gang.join()
print(gang.device)
gang.barrier()
gang.leave()
"""


def _bench(directory: Path, **keys: Any) -> TrainerBench:
    return TrainerBench.model_validate(
        {
            "trainer": {"model": {"name": str(directory), "seq_len": 32}, "micro_batch_tokens": 256, **keys},
            "data": {"type": "variable", "batch_size": 16, "seq_len": 32},
            "steps": 3,
        }
    )


def measured(bench: TrainerBench, device: torch.device) -> list[BenchStep]:
    """Return the steps of one process."""
    gang = Gang(device=device)
    try:
        return measure(bench, gang=gang, on_step=lambda step: None)
    finally:
        gang.leave()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_a_digest_on_the_gpu_is_the_hosts(gpu: torch.device, dtype: torch.dtype):
    """7 of the list."""
    values = torch.arange(3_000_001, device=gpu).to(dtype)
    width = values.element_size()
    bits = values.cpu().view(torch.uint8).numpy().view(f"u{width}")
    assert device_digest(values, start=7) == bits_digest(bits, start=7)
    signed = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    assert torch_digest(signed) == bits_digest(bits)


@pytest.mark.parametrize("are_shared", [False, True])
def test_a_snapshot_has_the_bits_of_the_masters_while_the_next_step_runs(gpu: torch.device, are_shared: bool):
    """6 of the list: what is copied does not change behind it, also where another process sees it."""
    model = nn.Linear(2048, 2048, bias=False).to(gpu)
    snapshots = Snapshots(model, dtype=torch.bfloat16, rank=0, device=gpu, layout=RankLayout(), are_shared=are_shared)
    expected = model.weight.detach().bfloat16().cpu()
    [part] = snapshots.take(1)
    assert torch.from_numpy(part.bits.view("i2")).is_pinned()
    for _ in range(20):
        with torch.no_grad():
            model.weight.add_(1.0)
    assert np.array_equal(part.bits, expected.view(torch.int16).numpy().view("u2").ravel())
    assert (part.place is not None) == are_shared
    snapshots.close()


def test_a_state_on_the_host_steps_as_one_on_the_gpu(gpu: torch.device):
    models = [nn.Linear(64, 64).to(gpu), nn.Linear(64, 64).to(gpu)]
    models[1].load_state_dict(models[0].state_dict())
    for model, offloads in zip(models, (False, True), strict=True):
        optimizer = PolicyOptimizer(
            model,
            optim=OptimConfig(lr=1e-2),
            scheduler=SchedulerConfig(),
            max_steps=None,
            offloads_state=offloads,
        )
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(8, 64, device=gpu)).square().mean().backward()
            optimizer.step(step)
        parts = optimizer.state_tensors()["weight"]
        assert parts["exp_avg"].device.type == ("cpu" if offloads else "cuda")
    assert torch.allclose(models[0].weight, models[1].weight, atol=1e-6)


def test_changes_are_scattered_from_the_gpus_own_memory(gpu: torch.device):
    """12 of the list, its mechanism: what the pause writes was there before it."""
    parameter = torch.zeros(5000, dtype=torch.bfloat16, device=gpu)
    region = Region(
        tensor="w",
        slot=Slot(module="m", name="weight"),
        shape=(5000,),
        source_offset=0,
        source_strides=(1,),
        target_offset=0,
        target_strides=(1,),
    )
    index, bits = np.array([3, 4999]), np.array([0x3F80, 0x4000], np.uint16)
    write = Write(region=region, index=index, positions=index, bits=bits).on(gpu)
    assert write.staged is not None and all(each.device == gpu for each in write.staged)
    write.put(None, parameter)  # type: ignore[arg-type] - of a scatter no file is read
    assert parameter[3] == 1.0 and parameter[4999] == 2.0


def test_the_address_of_a_parameter_stays_over_steps(gpu: torch.device):
    """10 of the list, the trainer's half."""
    model = nn.Linear(64, 64).to(gpu)
    optimizer = PolicyOptimizer(model, optim=OptimConfig(lr=1e-2), scheduler=SchedulerConfig(), max_steps=None)
    addresses = [each.data_ptr() for each in model.parameters()]
    for step in range(50):
        model(torch.randn(8, 64, device=gpu)).mean().backward()
        optimizer.step(step)
    assert addresses == [each.data_ptr() for each in model.parameters()]


SAMPLES = (700, 400, 300, 90, 33, 8, 5)


@pytest.mark.parametrize("window", [None, 128])
def test_the_kernel_for_varying_lengths_computes_what_a_dense_mask_does(gpu: torch.device, window: int | None):
    """Log-probs of packed rows are as near to those in float32 with either, and so are gradients; bits repeat."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "initializer_range": 0.1}
    windows = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads, **windows)).to(gpu)
    rng = np.random.default_rng(0)
    samples = [
        replace(fake_sample(length, vocabulary=512, of_rl=True), token_ids=rng.integers(0, 512, length, np.int32))
        for length in SAMPLES
    ]
    rows = build_micro_batch(samples, rows=[list(range(len(samples)))], seq_len=1024, device=gpu)

    def learned(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        logprobs_BT, _ = token_logprobs(model, rows)
        logprobs_BT[rows.loss_mask_BT].mean().backward()
        return logprobs_BT.detach(), torch.cat([each.grad.float().flatten() for each in model.parameters()])

    exact = learned(model)
    low = model.bfloat16()
    dense = learned(low)
    assert use_varlen_kernel(low, compute_dtype=torch.bfloat16, device=gpu)
    torch.use_deterministic_algorithms(True)
    try:
        varlen, again = learned(low), learned(low)
    finally:
        torch.use_deterministic_algorithms(False)
    for wanted, one, other, repeated in zip(exact, dense, varlen, again, strict=True):
        assert float((other - wanted).norm()) <= 1.2 * float((one - wanted).norm())
        assert torch.equal(other, repeated)
    assert float((dense[0] - varlen[0]).abs().max()) > 0, "the same kernel twice"


@pytest.mark.parametrize(
    ("size", "keys"), [("0.6B", {}), ("0.6B", {"ac": {}}), ("4B", {"ac": {}, "lora": {"rank": 16}})]
)
def test_the_measured_peak_is_the_estimate(gpu: torch.device, tmp_path: Path, size: str, keys: dict[str, Any]):
    """4 of the list: within 10 %."""
    directory = write_model(size, tmp_path / size)
    bench = TrainerBench.model_validate(
        {
            "trainer": {"model": {"name": str(directory), "seq_len": 2048, **keys}, "micro_batch_tokens": 4096},
            "data": {"batch_size": 6, "seq_len": 2048},
            "steps": 2,
        }
    )
    planned = simulate(bench.trainer, config_of(size), num_gpus=1).peak
    if planned > torch.cuda.mem_get_info(gpu)[0]:
        pytest.skip(f"{size} takes {planned / 2**30:.0f} GiB")
    steps = measured(bench, gpu)
    assert abs(planned / steps[-1].peak_bytes - 1) < 0.1, f"planned {planned}, measured {steps[-1].peak_bytes}"


def test_steps_are_as_fast_while_a_version_is_published(gpu: torch.device, tmp_path: Path):
    """17 of the list: within 5 %, of a model of 0.6 B."""
    directory = write_model("0.6B", tmp_path / "model")
    bench = TrainerBench.model_validate(
        {
            "trainer": {"model": {"name": str(directory), "seq_len": 2048}, "micro_batch_tokens": 4096},
            "data": {"batch_size": 8, "seq_len": 2048},
        }
    )
    gang, log = Gang(device=gpu), _Announced()
    learner = Learner.of_start_model(
        bench, gang=gang, directory=directory, start_directory=directory, code=CustomCode()
    )
    layout = BatchLayout.of(learner.config, learner.packing)
    samples = fake_samples(bench.data, step=0, seed=0, vocabulary=151_936)

    def step() -> float:
        torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        learn(learner, fake_batch(samples, step=0, layout=layout, gang=gang))
        torch.cuda.synchronize(gpu)
        return time.perf_counter() - began

    store, names = LocalStore(tmp_path / "store"), Names("gpu", "run")
    url = (tmp_path / "store").as_uri()  # large enough for a process of its own
    target = PublishTarget(store=store, names=names, gang=gang, epoch=1, store_url=url)
    plan = PublishPlan(first_version=0, lineage=0)
    alone, beside = list[float](), list[float]()
    with Publisher(learner, target, log_client=log, files=(), vocabulary=151_936, plan=plan) as publisher:
        for version in range(6):
            publisher.publish(version)
            while len(log.entries) <= version:  # it is under way
                publisher.raise_failure()
                (beside if version else []).append(step())  # the first one is whole, and warms up
            publisher.finish()
            alone += [step() for _ in range(5)]
    gang.leave()
    assert len(beside) >= 5, "no step fits beside a version: take a larger model"
    assert median(beside) <= 1.05 * median(alone)


class _Announced:
    """The run's log, as far as a publisher needs it."""

    epoch = 1

    def __init__(self) -> None:
        self.entries: list[policy_pb2.PolicyEntry] = []

    def append_policy(self, entry: policy_pb2.PolicyEntry, *, is_replay: bool) -> None:
        self.entries.append(entry)

    def write_event(self, event: event_pb2.Event) -> None:
        """Dropped."""


def test_two_hundred_steps_of_random_lengths_do_not_grow(gpu: torch.device, tmp_path: Path):
    """18 of the list."""
    bench = _bench(make_model("dense", tmp_path)).model_copy(update={"steps": 200})
    steps = measured(bench, gpu)
    assert steps[-1].peak_bytes < 1.1 * max(step.peak_bytes for step in steps[:100])


@pytest.mark.parametrize("determinism", ["strict", "best_effort"])
def test_two_starts_compute_the_same(gpu: torch.device, tmp_path: Path, determinism: str):
    """15 of the list: strict gives the same bits, or says in a sentence why not."""
    directory = make_model("dense", tmp_path)
    digests = []
    for _ in range(2):
        bench = _bench(directory, determinism=determinism)
        command = [sys.executable, "-c", STEPS, bench.model_dump_json()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        digests.append(json.loads(done.stdout.splitlines()[-1]))
    assert determinism == "best_effort" or digests[0] == digests[1]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["FSDP 2", "TP 2", "CP 2", "EP 2", "FSDP 4", "FSDP 8"])
def test_several_gpus_learn_what_one_learns(gpu: torch.device, tmp_path: Path, layout: str):
    """14 of the list: same loss, gradients and policy, and a checkpoint goes on in the other one."""
    name, (size, keys) = "moe" if "EP" in layout else "dense", {**LAYOUTS, "FSDP 8": (8, {})}[layout]
    if torch.cuda.device_count() < size:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices, and the layout needs {size}")
    rows = list(compare(tmp_path / "jobs", {name: make_model(name, tmp_path)}, layouts={layout: (size, keys)}))
    bad = [row for row in rows if not row.is_within(times=10)]  # sums of a GPU have another order
    assert rows and not bad, table(bad)


@pytest.mark.timeout(900)
def test_a_gang_gets_a_gpu_for_each_rank(two_gpus: torch.device):
    """3 of the list, its second half."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}", "--no-python", sys.executable, "-c", DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert sorted(done.stdout.split()) == ["cuda:0", "cuda:1"], done.stderr[-2000:]
