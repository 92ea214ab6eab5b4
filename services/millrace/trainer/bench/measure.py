"""Times steps by phase: samples into micro-batches, forward, backward with the loss, and the optimizer's step.

The step is the trainer's own (`trainer.loop`); nothing is published, saved or reported.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.config.sections.rl import FakeDataConfig, TrainerBench
from millrace.custom_code import CustomCode
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.types import TrainSample
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout, MicroBatch, Minibatch, build_micro_batch, fake_sample
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.plan import in_order, plan_micro_batches
from millrace.trainer.log.batches import Batch
from millrace.trainer.loop import forward_backward
from millrace.trainer.losses import LossInputs
from millrace.trainer.model.compiled import take_failures
from millrace.trainer.model.pretrained import resolve_model_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStep:
    """One step: seconds by phase, tokens without padding over all ranks, and the peak of this rank so far, in bytes.

    `step` 0 warms up. `cpu_s` are the CPU seconds of this process alone.
    """

    step: int
    num_tokens: int
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    cpu_s: float
    peak_bytes: int
    mfu: float | None
    problems: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second over all ranks."""
        return self.num_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the step as plain data."""
        return asdict(self) | {"seconds": self.seconds, "tokens_per_s": self.tokens_per_s}


class _TimedLearner(Learner):
    """A learner that adds the seconds of its forward passes to `forward_s`."""

    __slots__ = ("forward_s",)

    def loss_inputs(self, micro_batch: MicroBatch) -> tuple[LossInputs, torch.Tensor, torch.Tensor]:
        """Return what `Learner.loss_inputs` returns, and add the seconds that it took to `forward_s`."""
        began = _now(self.gang)
        given = Learner.loss_inputs(self, micro_batch)
        self.forward_s += _now(self.gang) - began
        return given


def measure(bench: TrainerBench, *, gang: Gang, on_step: Callable[[BenchStep], None]) -> list[BenchStep]:
    """Train on fake batches, and return the measured steps without the warm-up. Collective in a gang.

    `on_step` is called with every step at every rank, the warm-up too. Raises NotFoundError if there is no such model,
    and what a run's start raises.
    """
    directory = resolve_model_directory(bench.trainer.model.name)
    learner = _TimedLearner.of_start_model(
        bench, gang=gang, directory=directory, start_directory=directory, code=CustomCode()
    )
    assert isinstance(learner, _TimedLearner)
    steps = []
    for step in _steps(bench, learner):
        on_step(step)
        steps.append(step)
    return steps[1:]


def _steps(bench: TrainerBench, learner: _TimedLearner) -> Iterator[BenchStep]:
    gang, layout = learner.gang, BatchLayout.of(learner.config, learner.packing)
    vocabulary = int(learner.model.config.get_text_config().vocab_size)  # pyright: ignore
    memory, utilization = PeakMemory(gang.device), learner.utilization
    for step in range(bench.steps + 1):
        samples = fake_samples(bench.data, step=step, seed=bench.seed, vocabulary=vocabulary, is_sft=bench.is_sft)
        gang.barrier()
        learner.forward_s, cpu_began, began = 0.0, time.process_time(), _now(gang)
        batch = fake_batch(samples, step=step, layout=layout, gang=gang)
        ready = _now(gang)
        forward_backward(learner, batch, batch.minibatches[0])
        learned = _now(gang)
        learner.optimizer.step(step)
        stepped = _now(gang)
        lengths = [each.length for each in batch.header.samples]
        yield BenchStep(
            step=step,
            num_tokens=sum(lengths),
            data_s=ready - began,
            forward_s=learner.forward_s,
            backward_s=learned - ready - learner.forward_s,
            optimizer_s=stepped - learned,
            cpu_s=time.process_time() - cpu_began,
            peak_bytes=memory.peak,
            mfu=None if utilization is None else utilization.mfu(lengths, seconds=stepped - began),
            problems=tuple(take_failures(learner.model)),
        )


def _now(gang: Gang) -> float:
    """Return the time after the device has finished all queued work."""
    if gang.device.type == "cuda":
        torch.cuda.synchronize(gang.device)
    return time.perf_counter()


# Batches of fake samples, a pure function of seed and step.

SHORTEST = 0.1
"""Of `seq_len`: the shortest sample of variable lengths."""


def fake_samples(
    data: FakeDataConfig, *, step: int, seed: int, vocabulary: int, is_sft: bool = False
) -> list[TrainSample]:
    """Make the samples of a step: random tokens, `data.seq_len` each, or 10 to 100 % of that.

    `vocabulary` is the number of token ids. Samples of SFT (`is_sft`) have cross-entropy weights and no sampled tokens.
    """
    random = np.random.default_rng((seed, step))
    shortest = max(int(SHORTEST * data.seq_len), 2)
    samples = []
    for ordinal in range(data.batch_size):
        length = data.seq_len if data.type == "fixed" else int(random.integers(shortest, data.seq_len + 1))
        sample = fake_sample(length, vocabulary=vocabulary, of_rl=not is_sft)
        token_ids = random.integers(0, vocabulary, length).astype(np.int32)
        # About the log-probs of a model that knows nothing, so that no loss masks the tokens as off-policy.
        logprobs = np.full(length, -np.log(vocabulary), np.float32)
        samples.append(replace(sample, token_ids=token_ids, inference_logprobs=logprobs, ordinal=ordinal))
    return samples


def fake_batch(samples: Sequence[TrainSample], *, step: int, layout: BatchLayout, gang: Gang) -> Batch:
    """Make this rank's batch of all ranks' `samples`: planned, padded or packed, and on the device like a real one."""
    lengths = [min(len(sample.token_ids), layout.seq_len) for sample in samples]
    plans = plan_micro_batches(
        lengths,
        max_tokens=layout.micro_batch_tokens,
        world_size=gang.layout.data_size,
        packing=layout.packing,
    )
    micro_batches, places = [], []
    for rows in plans[gang.data_rank]:
        flat = [index for row in rows for index in row]
        mine = [samples[index] for index in flat]
        micro_batches.append(build_micro_batch(mine, rows=in_order(rows), seq_len=layout.seq_len, device=gang.device))
        places.append(flat)
    entries = [
        batch_pb2.SampleEntry(ordinal=sample.ordinal, length=length)
        for sample, length in zip(samples, lengths, strict=True)
    ]
    header = batch_pb2.BatchHeader(step=step, envs=[""], samples=entries, num_tokens=sum(lengths))
    minibatch = Minibatch(micro_batches=micro_batches, samples=places)
    return Batch(header=header, chain_hash=b"", minibatches=[minibatch], wait_s=0.0, load_s=0.0)


# The peak of memory: a GPU's allocator knows it, and Linux that of a process.

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """The peak of memory since this object was made: of the device's allocator, or of the process's resident set."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif _RESET.exists():
            _RESET.write_text("5")  # of all that the kernel counts, only the peak of the resident set

    @property
    def peak(self) -> int:
        """Return the peak in bytes so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if _STATUS.exists():
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        factor = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor
