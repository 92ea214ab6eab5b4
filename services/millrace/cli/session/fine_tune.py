"""Run a fine-tuning as a supervised child process, or as several that train one model together."""

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import click

from millrace.cli.interrupts import Interrupts
from millrace.config import SFTConfig
from millrace.local.directory import StackId, hold_directory
from millrace.processes.supervisor import Child, ProcessSpec, Supervisor, describe_death
from millrace.race import first_of
from millrace.runlog import names
from millrace.telemetry.logging import FILE_VARIABLE

TRAINER = ("-m", "millrace.trainer.main", "sft", "--config")
_TOGETHER_S = 5.0  # between the ends of ranks that fail for the same reason


class Evaluated(Protocol):
    """Evaluations that are played during the training."""

    @property
    def task(self) -> "asyncio.Task[None]":
        """Return the task that plays the evaluations."""
        ...

    async def finish(self) -> None:
        """Wait for the evaluations that are left, then write and print the summary."""
        ...


Evaluates = Callable[[SFTConfig, Path, Interrupts], contextlib.AbstractAsyncContextManager[Evaluated]]
"""Context manager that evaluates due weights in a directory during its block."""


async def fine_tune(
    config: SFTConfig,
    interrupts: Interrupts,
    *,
    num_ranks: int = 1,
    gpus: Sequence[int] | None = None,
    evaluating: "Evaluates | None" = None,
) -> int:
    """Run the fine-tuning and return its exit code. Ctrl-C stops it and its children.

    `gpus` are the GPUs of the training, None for all. `evaluating` plays the evaluations, if the config has any. With
    several ranks, only the output of the first is shown; the others write logs. Raises ProcessDiedError if another rank
    fails first, InvalidStateError (STACK_RUNNING) if another command works in the run's directory.
    """
    name = config.run.name or names.make(f"sft-{Path(config.model.name).name}", secrets.token_hex(2))
    directory = Path(config.output_dir) / name
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if config.run.name is None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    own = StackId.new(directory)
    with await hold_directory(directory, own, note=partial(click.echo, err=True)) as lock:
        path = directory / "config.json"
        path.write_text(config.resolved_json())
        gang = {} if num_ranks == 1 else gang_environ(num_ranks)
        argv = [sys.executable, *TRAINER, str(path), *(() if evaluating is None else ("--evaluated",))]
        supervisor = Supervisor(stack_id=str(own))
        supervisor.lock = lock.fileno()
        async with supervisor:
            interrupts.on_second(supervisor.skip_grace.set)
            specs = [rank_spec(rank, argv=argv, gang=gang, logs=logs, gpus=gpus) for rank in range(num_ranks)]
            beside = contextlib.nullcontext() if evaluating is None else evaluating(config, directory, interrupts)
            async with exporting(config.model_dump(mode="json"), directory), beside as evaluations:
                ranks = [await supervisor.start(spec) for spec in specs]
                code = await _until_over(ranks, evaluations)
    # As shells have it: 128 and the number of the signal.
    return code if code >= 0 else 128 - code


async def _until_over(ranks: Sequence[Child], evaluations: "Evaluated | None") -> int:
    """Wait for the training and return its exit code.

    If it succeeded, first wait for the evaluations that are left. A defect of the evaluations ends both.
    """
    if evaluations is None:
        return await wait_for_ranks(ranks)
    done, failure = await first_of(wait_for_ranks(ranks), evaluations.task)
    if done is None:
        assert failure is not None  # it ends by itself only with a defect
        failure.result()
    code = done.result() if done is not None else 1
    if code == 0:
        await evaluations.finish()
    return code


@contextlib.asynccontextmanager
async def exporting(config: Mapping[str, Any], directory: Path) -> AsyncIterator[None]:
    """Copy the lines of `metrics.jsonl` in `directory` to W&B during the block, if the config has W&B.

    A problem is reported once on standard error, and does not end the block.
    """
    if config["wandb"] is None:
        yield
        return
    from millrace.readers.exports.of_run import WANDB, Exporter

    async def warn(reason: str, text: str) -> None:
        click.echo(f"warning: {text} [{reason}]", err=True)

    fine_tuning = replace(WANDB, module="millrace.readers.exports.fine_tuning", rest="metrics.jsonl has everything")
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)
    exporter = Exporter(directory.name, fine_tuning, warn=warn, log_path=logs / "wandb.log")
    exporter.start(
        config=config,
        uid=_wandb_id(directory),
        directory=str(directory),
        metrics=str(directory / "metrics.jsonl"),
    )
    try:
        yield
        await exporter.finish()
    finally:
        await exporter.close()


def _wandb_id(directory: Path) -> str:
    """Return the W&B id of the run in this directory. It is made once and kept in a file."""
    path = directory / "wandb-id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


def rank_spec(
    rank: int, *, argv: Sequence[str], gang: Mapping[str, str], logs: Path, gpus: Sequence[int] | None = None
) -> ProcessSpec:
    """Return the process of one rank, with the command line `argv`.

    All ranks but the first write their output into `logs`. `gang` are the variables of the whole gang, empty for one
    rank. `gpus` are the GPUs of all ranks together, None for all of the machine.
    """
    return ProcessSpec(
        name=f"rank {rank}" if rank else "trainer",
        argv=list(argv),
        env={
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}),
            **({**gang, "RANK": str(rank), "LOCAL_RANK": str(rank)} if gang else {}),
            **({} if rank else {FILE_VARIABLE: str(logs / "trainer.log")}),
        },
        log_path=logs / f"trainer-rank-{rank}.log" if rank else None,
    )


async def wait_for_ranks(ranks: Sequence[Child]) -> int:
    """Wait until all ranks have succeeded or one has failed; return the exit code of rank 0.

    Raises ProcessDiedError if another rank failed for a reason that rank 0 does not report.
    """
    while True:
        failed = next((child for child in ranks if child.exited.done() and child.exited.result() != 0), None)
        if failed is not None and failed is ranks[0]:
            return failed.exited.result()
        if failed is not None:
            # The ranks fail together if they can; then the first one says why. One that was killed leaves it in the
            # middle of a collective, whose error says nothing.
            await asyncio.wait({ranks[0].exited}, timeout=_TOGETHER_S)
            if not ranks[0].is_alive and ranks[0].exited.result() == failed.exited.result() > 0:
                return ranks[0].exited.result()
            raise await asyncio.to_thread(describe_death, failed)
        running = [child.exited for child in ranks if not child.exited.done()]
        if not running:
            return 0
        # unregistered wait: the command waits for as long as the training takes, and shows its progress
        await first_of(*running)


def gang_environ(num_ranks: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for all ranks, without those of the rank itself."""
    from millrace.local.directory import free_port

    count = str(num_ranks)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {**address, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
