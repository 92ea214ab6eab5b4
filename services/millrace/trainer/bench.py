"""Steps of the trainer in isolation, on fake samples: what `--bench` measures."""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from millrace.config.sections.rl import FakeDataConfig, TrainerBench
from millrace.custom_code import CustomCode
from millrace.errors import NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.models.routing import RoutingShape
from millrace.models.torch_support import shortage_named
from millrace.rollouts.types import TrainSample
from millrace.telemetry.logging import setup
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout, MicroBatch, Minibatch, build_micro_batch, fake_sample
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.plan import in_order, plan_micro_batches
from millrace.trainer.log.batches import Batch
from millrace.trainer.loop import forward_backward
from millrace.trainer.losses import LossInputs, Objective
from millrace.trainer.model.compiled import take_failures
from millrace.trainer.model.pretrained import resolve_model_directory

# `millrace-trainer bench --config FILE`: progress on stderr, the table on stdout, everything in files beside FILE.
#
# `bench.json` has the summary and each step, `metrics.jsonl` the steps under prime-rl's names.

# Times steps by phase: samples into micro-batches, forward, backward with the loss, and the optimizer's step.
#
# The step is the trainer's own (`trainer.loop`); nothing is published, saved or reported.


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

    def loss_inputs(
        self, micro_batch: MicroBatch, objective: Objective
    ) -> tuple[LossInputs, torch.Tensor, torch.Tensor]:
        """Return what `Learner.loss_inputs` returns, and add the seconds that it took to `forward_s`."""
        began = _now(self.gang)
        given = Learner.loss_inputs(self, micro_batch, objective)
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
    """Train on fake batches, and yield each measured step, the warm-up first. Collective in a gang."""
    gang, layout = learner.gang, BatchLayout.of(learner.config, learner.packing, routing=learner.routing)
    vocabulary = int(learner.model.config.get_text_config().vocab_size)  # pyright: ignore
    memory, utilization = PeakMemory(gang.device), learner.utilization
    for step in range(bench.steps + 1):
        shown = {"vocabulary": vocabulary, "is_sft": bench.is_sft, "routing": layout.routing}
        samples = fake_samples(bench.data, step=step, seed=bench.seed, **shown)
        # No rank's time is to include the wait for the samples of another one.
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
    """Wait until the device has finished all queued work, and return the seconds of a monotonic clock."""
    if gang.device.type == "cuda":
        torch.cuda.synchronize(gang.device)
    return time.perf_counter()


# Batches of fake samples, a pure function of seed and step.

SHORTEST = 0.1
"""Of `seq_len`: the shortest sample of variable lengths."""


def fake_samples(
    data: FakeDataConfig,
    *,
    step: int,
    seed: int,
    vocabulary: int,
    is_sft: bool = False,
    routing: RoutingShape | None = None,
) -> list[TrainSample]:
    """Make the samples of step `step`: random tokens, `data.seq_len` each, or 10 to 100 % of that.

    `vocabulary` is the number of token ids. Equal `seed` and `step` give equal samples. With `is_sft` they have
    cross-entropy weights and no sampled tokens. With `routing` they have experts of a model of that shape.
    """
    random = np.random.default_rng((seed, step))
    shortest = max(int(SHORTEST * data.seq_len), 2)
    samples = []
    for ordinal in range(data.batch_size):
        length = data.seq_len if data.type == "fixed" else int(random.integers(shortest, data.seq_len + 1))
        sample = fake_sample(length, vocabulary=vocabulary, of_rl=not is_sft, routing=routing)
        token_ids = random.integers(0, vocabulary, length).astype(np.int32)
        # About the log-probs of a model that knows nothing, so that no loss masks the tokens as off-policy.
        logprobs = np.full(length, -np.log(vocabulary), np.float32)
        samples.append(replace(sample, token_ids=token_ids, inference_logprobs=logprobs, ordinal=ordinal))
    return samples


def fake_batch(samples: Sequence[TrainSample], *, step: int, layout: BatchLayout, gang: Gang) -> Batch:
    """Make this rank's batch number `step` of all ranks' `samples`, planned as a real one, on the device."""
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
        made = {"seq_len": layout.seq_len, "device": gang.device, "routing": layout.routing}
        micro_batches.append(build_micro_batch(mine, rows=in_order(rows), **made))
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
        """Begin to measure the peak of a GPU's memory, or, on a CPU, of this process's."""
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif _RESET.exists():
            _RESET.write_text("5")  # of all that the kernel counts, only the peak of the resident set

    @property
    def peak(self) -> int:
        """Return the peak in bytes since this object was made.

        It is that of the device's allocator, or of the process's resident set. On systems without a resettable peak it
        is that since the process began.
        """
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if _STATUS.exists():
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        factor = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor


def run(path: Path) -> int:
    """Run the benchmark that the JSON document in the file `path` describes, and return 0.

    Writes each rank's metrics beside the document; rank 0 also writes `bench.json` and prints progress and the table.
    """
    bench = _load(path)
    setup("trainer", level="warning", json_lines=False)
    disable_progress_bar()
    gang = Gang.join()
    try:
        name = f"metrics-{gang.rank}.jsonl" if gang.rank else "metrics.jsonl"
        with shortage_named("train on batches of this size"), (path.parent / name).open("w") as metrics:

            def on_step(step: BenchStep) -> None:
                metrics.write(json.dumps(_metrics(step)) + "\n")
                metrics.flush()
                if gang.is_leader:
                    _say(step, bench.steps)

            steps = measure(bench, gang=gang, on_step=on_step)
        (peak,) = gang.max([float(steps[-1].peak_bytes)])
    finally:
        gang.leave()
    if gang.is_leader:
        found = summary(steps, num_ranks=gang.world_size, peak_bytes=int(peak))
        document = {"summary": found, "steps": [step.to_json() for step in steps], "config": bench.model_dump()}
        (path.parent / "bench.json").write_text(json.dumps(document, indent=2) + "\n")
        print("\n".join(lines(bench, found)))
    return 0


def _load(path: Path) -> TrainerBench:
    """Read the description of a benchmark; raise NotFoundError if the file cannot be read."""
    try:
        return TrainerBench.model_validate_json(path.read_bytes())
    except OSError as error:
        raise NotFoundError(
            f"config {path} cannot be read: {error.strerror}",
            reason="CONFIG_NOT_FOUND",
            remedy="pass the file that `millrace trainer --bench` writes",
        ) from error


def _metrics(step: BenchStep) -> dict[str, float | int]:
    """Return the metrics of a step under prime-rl's names."""
    return {
        "step": step.step,
        "perf/throughput": step.tokens_per_s,
        **({} if step.mfu is None else {"perf/mfu": step.mfu}),
        "perf/peak_memory": step.peak_bytes / 2**30,
        "progress/tokens": step.num_tokens,
        "time/step": step.seconds,
        "time/load_data": step.data_s,
        "time/forward": step.forward_s,
        "time/backward": step.backward_s,
        "time/optimizer": step.optimizer_s,
    }


def _say(step: BenchStep, num_steps: int) -> None:
    """Print a line about a step to stderr, and its problems as warnings."""
    which = f"step {step.step}/{num_steps}" if step.step else "warm-up"
    print(f"{which}  {step.seconds:.3f} s  {step.tokens_per_s:,.0f} tokens/s", file=sys.stderr, flush=True)
    for problem in step.problems:
        print(f"warning: {problem}", file=sys.stderr, flush=True)


# The table of a bench: medians over steps of tokens/s, MFU, peak memory, and time by phase.

_PHASES = ("data", "forward", "backward", "optimizer")


def summary(steps: Sequence[BenchStep], *, num_ranks: int, peak_bytes: int) -> dict[str, Any]:
    """Return medians over the measured steps by name; `peak_bytes` is the largest peak of memory of all ranks."""
    used = [step.mfu for step in steps if step.mfu is not None]
    tokens_per_s = median(step.tokens_per_s for step in steps)
    return {
        "steps": len(steps),
        "ranks": num_ranks,
        "tokens_per_step": round(median(step.num_tokens for step in steps)),
        "step_s": median(step.seconds for step in steps),
        "cpu_s": median(step.cpu_s for step in steps),
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_rank": tokens_per_s / num_ranks,
        "mfu": median(used) if used else None,
        "peak_bytes": peak_bytes,
        **{f"{name}_s": median(getattr(step, f"{name}_s") for step in steps) for name in _PHASES},
    }


def lines(bench: TrainerBench, found: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table for people; `found` is what `summary` returned."""
    data, ranks = bench.data, found["ranks"]
    mfu = "unknown (set peak_tflops)" if found["mfu"] is None else f"{found['mfu']:.1%}"
    rows = [
        ("tokens/s", f"{found['tokens_per_s']:,.0f}"),
        *([("tokens/s per rank", f"{found['tokens_per_s_per_rank']:,.0f}")] if ranks > 1 else []),
        ("MFU", mfu),
        ("peak memory", f"{found['peak_bytes'] / 2**30:.2f} GiB{' of the fullest rank' if ranks > 1 else ''}"),
        ("step", f"{found['step_s']:.3f} s ({found['cpu_s']:.3f} CPU s of one rank)"),
        *(
            (f"  {name}", f"{found[f'{name}_s']:.3f} s  {found[f'{name}_s'] / found['step_s']:4.0%}")
            for name in _PHASES
        ),
    ]
    lengths = "" if data.type == "fixed" else "10 to 100 % of "
    return [
        f"{bench.trainer.model.name}: {data.batch_size} samples of {lengths}{data.seq_len} tokens, micro-batches of "
        f"{bench.trainer.micro_batch_tokens} tokens, {ranks} rank{'s' if ranks > 1 else ''}; medians of "
        f"{found['steps']} steps after one that warms up",
        *(f"{name:<18} {value}" for name, value in rows),
    ]
