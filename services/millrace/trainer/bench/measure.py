"""Times steps by phase: samples into micro-batches, forward, backward with the loss, and the optimizer's step.

The step is the trainer's own (`trainer.loop`); nothing is published, saved or reported.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from millrace.config.sections.bench import TrainerBench
from millrace.custom_code import CustomCode
from millrace.trainer.bench.data import fake_batch, fake_samples
from millrace.trainer.bench.memory import PeakMemory
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout, MicroBatch
from millrace.trainer.learning.learner import Learner
from millrace.trainer.loop import forward_backward
from millrace.trainer.losses import LossInputs
from millrace.trainer.model.compiled import take_failures
from millrace.trainer.model.pretrained import resolve_model_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStep:
    """One step: seconds by phase, tokens without padding over all ranks, and the peak of this rank so far, in bytes.

    `step` 0 warms up. `cpu_s` is what this process took of CPUs, on a machine that others share.
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
        """The whole step."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks."""
        return self.num_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The step as plain data."""
        return asdict(self) | {"seconds": self.seconds, "tokens_per_s": self.tokens_per_s}


class _TimedLearner(Learner):
    """A learner that knows how long its forwards took."""

    __slots__ = ("forward_s",)

    def loss_inputs(self, micro_batch: MicroBatch) -> tuple[LossInputs, torch.Tensor, torch.Tensor]:
        """The same, timed."""
        began = _now(self.gang)
        given = Learner.loss_inputs(self, micro_batch)
        self.forward_s += _now(self.gang) - began
        return given


def measure(bench: TrainerBench, *, gang: Gang, on_step: Callable[[BenchStep], None]) -> list[BenchStep]:
    """The steps that count. Collective in a gang; `on_step` hears of each at every rank, with that which warms up.

    NotFoundError if there is no such model, and what a run's start raises.
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
    """A clock that what was queued on the device has reached."""
    if gang.device.type == "cuda":
        torch.cuda.synchronize(gang.device)
    return time.perf_counter()
