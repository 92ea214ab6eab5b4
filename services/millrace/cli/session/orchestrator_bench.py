"""`millrace orchestrator --bench`: play batches as in a run, on a local stack whose trainer does not train.

The first batches are for warm-up and are not counted: one, plus the number by which sampling may run ahead. The run has
no last step and is cancelled after the last measured batch; otherwise fewer rollouts would be in progress towards its
end.
"""

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

from millrace.cli.interrupts import Interrupts
from millrace.cli.session.bench import num_steps
from millrace.cli.session.fine_tune import exporting
from millrace.cli.session.follow import require_success
from millrace.cli.session.prepare import Prepared
from millrace.cli.session.run_session import stack_options
from millrace.cli.view.progress import Progress
from millrace.cli.view.view import PlainView
from millrace.client import Client
from millrace.config import OrchestratorConfig, RLConfig
from millrace.telemetry.settings import Settings
from millrace.v1 import event_pb2

# The steps of an orchestrator that was measured: what each batch was, and the table of their medians.


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    """Measurements of one batch.

    `seconds` is the time since the previous batch was committed; `num_tokens` includes the prompts. `rollout_s` and
    `model_s` are means over the rollouts that succeeded: their wall seconds, and the part spent waiting for the engine.
    """

    step: int
    seconds: float
    num_rollouts: int
    num_failed: int
    num_tokens: int
    num_sampled: int
    rollout_s: float
    model_s: float

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second, prompts included."""
        return self.num_tokens / self.seconds

    def metrics(self) -> dict[str, float | int]:
        """Return the batch's line in `metrics.jsonl`."""
        return {
            "step": self.step,
            "perf/throughput": self.tokens_per_s,
            "perf/sampled_throughput": self.num_sampled / self.seconds,
            "perf/rollouts_per_s": self.num_rollouts / self.seconds,
            "progress/tokens": self.num_tokens,
            "progress/samples": self.num_rollouts,
            "progress/failed_rollouts": self.num_failed,
            "time/step": self.seconds,
            "time/rollout": self.rollout_s,
            "time/rollout/model": self.model_s,
        }


def summary(batches: Sequence[MeasuredBatch], *, cpu_s: Mapping[str, float], peak: Mapping[str, int]) -> dict[str, Any]:
    """Return plain data about the batches: medians, the number of failed rollouts, and CPU seconds per batch.

    `cpu_s` has each process's CPU seconds over all batches, `peak` its peak memory in bytes.
    """
    rows = [batch.metrics() for batch in batches]
    medians = {name: median(row[name] for row in rows) for name in rows[0] if name != "step"}
    return {
        "steps": len(batches),
        "tokens_per_s": medians["perf/throughput"],
        "sampled_tokens_per_s": medians["perf/sampled_throughput"],
        "rollouts_per_s": medians["perf/rollouts_per_s"],
        "step_s": medians["time/step"],
        "rollout_s": medians["time/rollout"],
        "model_s": medians["time/rollout/model"],
        "num_failed": sum(batch.num_failed for batch in batches),
        "cpu_s": {name: seconds / len(batches) for name, seconds in cpu_s.items()},
        "peak_bytes": dict(peak),
    }


def lines(config: RLConfig, found: Mapping[str, Any], *, engine: str) -> list[str]:
    """Return the summary `found` as a table for the terminal; `engine` is the name of the measured engine."""
    loop, rest = config.orchestrator, found["rollout_s"] - found["model_s"]
    cpu = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found["cpu_s"].items())
    peaks = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in found["peak_bytes"].items())
    share = found["model_s"] / found["rollout_s"] if found["rollout_s"] else 0.0
    rows = [
        ("tokens/s", f"{found['tokens_per_s']:,.0f} (with their prompts)"),
        ("sampled tokens/s", f"{found['sampled_tokens_per_s']:,.0f}"),
        ("rollouts/s", f"{found['rollouts_per_s']:,.1f}"),
        *([("failed rollouts", str(found["num_failed"]))] if found["num_failed"] else []),
        ("peak memory", peaks),
        ("step", f"{found['step_s']:.3f} s"),
        ("  CPU seconds", cpu),
        ("a rollout", f"{found['rollout_s']:.3f} s"),
        ("  engine", f"{found['model_s']:.3f} s  {share:4.0%}"),
        ("  environment", f"{rest:.3f} s  {1 - share:4.0%}"),
    ]
    return [
        f"{config.model.name}: {_rollouts(loop)} rollouts a step, async level "
        f"{loop.async_level}, {engine} engine; medians of {found['steps']} steps after {1 + loop.async_level} that "
        "warm up",
        *(f"{name:<18} {value}" for name, value in rows),
    ]


def _rollouts(loop: OrchestratorConfig) -> str:
    """Return the number of rollouts per step as text, such as `8 × 16`."""
    sizes = sorted(set(loop.group_sizes.values()))
    if len(sizes) == 1:
        return f"{loop.groups_per_step} × {sizes[0]}"
    return f"{loop.batch_size}, in groups of {' and '.join(map(str, sizes))},"


OnBatch = Callable[[MeasuredBatch], None]
_LOOK_S = 0.5


def bench_config(config: RLConfig) -> RLConfig:
    """Return a copy of the config to measure, without a limit of steps: the caller has to end the run.

    Batches are filled whatever their rewards are, and there are no evaluations, checkpoints or exports to W&B.
    """
    loop = config.orchestrator.model_copy(update={"filter_zero_advantages": False, "eval": None, "max_steps": None})
    trainer = config.trainer.model_copy(update={"ckpt": None, "max_steps": None})
    without = {"max_steps": None, "ckpt": None, "wandb": None}
    return config.model_copy(update={"orchestrator": loop, "trainer": trainer, **without})


def warm_up(config: RLConfig) -> int:
    """Return the number of batches that are not counted."""
    return 1 + config.orchestrator.async_level


async def bench_orchestrator(prepared: Prepared, interrupts: Interrupts) -> int:
    """Measure, print the table, and return 0. The results are written below the config's `output_dir`.

    Raises CliError with the run's error if the run ends too early.
    """
    from millrace.local.stack import SERVICES, LocalStack

    config, steps = prepared.config, num_steps(prepared.flags)
    first = warm_up(config)
    directory = Path(config.output_dir) / f"bench-{secrets.token_hex(3)}"
    directory.mkdir(parents=True)
    resolved, metrics = config.model_dump(mode="json"), directory / "metrics.jsonl"

    def on_batch(batch: MeasuredBatch) -> None:
        """Print a line about a measured batch, and append its figures to `metrics.jsonl`."""
        _say(f"step {batch.step - first + 1}/{steps}  {batch.seconds:.3f} s  {batch.tokens_per_s:,.0f} tokens/s")
        with metrics.open("a") as file:
            file.write(json.dumps(batch.metrics()) + "\n")

    # A stack of its own, whatever Redis and store the environment names.
    alone = replace(prepared, config=bench_config(config), settings=Settings())
    options = stack_options(alone, directory)
    modules = {**SERVICES, "trainer": "millrace.trainer.untrained"}
    async with LocalStack(options, note=_say, modules=modules) as stack:
        interrupts.on_second(stack.supervisor.skip_grace.set)
        _say(f"starting a stack for the orchestrator's steps; process logs: {directory / 'logs'}")
        await stack.start()
        usage = ProcessUse(lambda: {name: child.pid for name, child in stack.supervisor.children.items()})
        async with Client(stack.address, access=stack.access) as client, exporting(resolved, directory):
            work = _measure(client, alone.config, steps, store=directory / "store", usage=usage, on_batch=on_batch)
            batches = await stack.guard(work)
    found = summary(batches, cpu_s=usage.cpu_s, peak=usage.peak)
    document = {"summary": found, "steps": [batch.metrics() for batch in batches], "config": resolved}
    path = directory / "bench.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    click.echo("\n".join(lines(config, found, engine=options.engine)))
    click.echo(f"{path}", err=True)
    return 0


async def _measure(
    client: Client, config: RLConfig, steps: int, *, store: Path, usage: "ProcessUse", on_batch: OnBatch
) -> list[MeasuredBatch]:
    """Play the run until `steps` batches are measured, and return them; `on_batch` is called with each.

    Batches of the warm-up are left out. `usage` measures the processes of the stack, whose store is the directory
    `store`. The run is cancelled after the last batch.
    """
    run = await client.runs.create(config.resolved_json(), run_id="bench")
    progress = Progress(name=run.name, uid=run.uid)
    view, batches, committed_s = PlainView(sys.stderr, progress), list[MeasuredBatch](), 0.0
    first = warm_up(config)
    looking = asyncio.create_task(usage.sample_memory(), name="what the processes of the bench use")
    try:
        async with contextlib.aclosing(client.runs.watch(run.name)) as events:
            async for event in events:
                progress.apply(event)
                view.show(event)
                if not event.HasField("batch_committed") or len(batches) == steps:
                    continue
                seconds, committed_s = _time(event) - committed_s, _time(event)
                if event.batch_committed.step < first:
                    _say(f"warm-up {event.batch_committed.step + 1}/{first}")
                    # Again at each: CPU time is counted from the last batch of the warm-up.
                    usage.begin()
                    continue
                usage.end()
                batches.append(await asyncio.to_thread(read_batch, store, run.uid, event, seconds=seconds))
                on_batch(batches[-1])
                if len(batches) == steps:
                    await client.runs.cancel(run.name, reason="every step is measured")
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    if len(batches) < steps:
        require_success(progress)
    return batches


def read_batch(directory: Path, uid: str, event: event_pb2.Event, *, seconds: float) -> MeasuredBatch:
    """Return the measurements of a committed batch, from its archive in the store at `directory`.

    `event` is that of its commit; `seconds` is the time since the batch before it.
    """
    from millrace.readers.exports.samples import read_samples
    from millrace.rollouts.types import RolloutStatus
    from millrace.runlog import Names
    from millrace.storage.local import LocalStore

    step, names = int(event.batch_committed.step), Names(Settings().prefix, uid)
    rollouts = [each.rollout for each in read_samples(LocalStore(directory), names, step=step, advantages=False)]
    good = [rollout for rollout in rollouts if rollout.status is RolloutStatus.OK]
    return MeasuredBatch(
        step=step,
        seconds=seconds,
        num_rollouts=len(good),
        num_failed=len(rollouts) - len(good),
        num_tokens=int(event.batch_committed.num_tokens),
        num_sampled=sum(rollout.num_loss_tokens for rollout in good),
        rollout_s=fmean(rollout.seconds for rollout in good),
        model_s=fmean(rollout.model_seconds for rollout in good),
    )


@dataclass(slots=True)
class ProcessUse:
    """Measures CPU time and memory of processes, each with its descendants, under the names in `pids`."""

    pids: Callable[[], Mapping[str, int]]
    peak: dict[str, int] = field(default_factory=dict)
    """The largest resident memory seen so far, in bytes."""
    _began: Mapping[str, float] = field(default_factory=dict)
    _ended: Mapping[str, float] = field(default_factory=dict)

    @property
    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds (user and system) between `begin` and `end`."""
        return {name: seconds - self._began.get(name, 0.0) for name, seconds in self._ended.items()}

    def begin(self) -> None:
        """Start the measurement of CPU time."""
        self._began = self._measure_processes()

    def end(self) -> None:
        """End the measurement of CPU time; may be called again later."""
        self._ended = self._measure_processes()

    async def sample_memory(self) -> None:
        """Sample the memory periodically, until cancelled."""
        # unregistered wait: a periodic look
        while True:
            self._measure_processes()
            await asyncio.sleep(_LOOK_S)

    def _measure_processes(self) -> dict[str, float]:
        """Return the CPU seconds of each process with its descendants so far, and raise the recorded peaks of
        memory.
        """
        import psutil

        cpu_s: dict[str, float] = {}
        for name, pid in self.pids().items():
            cpu_s[name], resident = 0.0, 0
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(pid)
                for process in (top, *top.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        times = process.cpu_times()
                        # `children_…` has the time of descendants that have ended.
                        cpu_s[name] += times.user + times.system + times.children_user + times.children_system
                        resident += process.memory_info().rss
            self.peak[name] = max(self.peak.get(name, 0), resident)
        return cpu_s


def _time(event: event_pb2.Event) -> float:
    """Return the time of an event in seconds since 1970."""
    return event.time.seconds + event.time.nanos / 1e9


def _say(text: str) -> None:
    click.echo(text, err=True)
