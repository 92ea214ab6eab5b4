"""An evaluation from its submission to its results: on a local stack of its own, or on a server."""

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from millrace.cli.connection import open_client
from millrace.cli.interrupts import Interrupts
from millrace.cli.session.eval_prepare import PreparedEval
from millrace.cli.session.eval_results import results
from millrace.cli.session.follow import follow, require_success
from millrace.cli.session.new_name import free_name
from millrace.cli.view.progress import Progress
from millrace.cli.view.view import PlainView, is_fancy
from millrace.client import Client
from millrace.config.schema import ClientConfig, EvalRunConfig
from millrace.errors import MillraceError
from millrace.local.ports import free_ports
from millrace.local.stack import SERVICES, LocalStack, StackOptions
from millrace.v1 import event_pb2, run_pb2

RESULTS_NAME = "eval.json"
LOOK_S = 0.5
SAY_S = 5.0
"""How often a line says how far it is where no bar can be drawn."""


class EvalView(PlainView):
    """Plain lines, and the reports kept."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(sys.stderr, progress)
        self.reports: dict[str, event_pb2.EvalCompleted] = {}

    def show(self, event: event_pb2.Event) -> None:
        """Print the event's line, and keep what an environment came to."""
        super().show(event)
        if event.HasField("eval_completed"):
            self.reports[event.eval_completed.env] = event.eval_completed


async def evaluate_here(prepared: PreparedEval, interrupts: Interrupts) -> tuple[dict[str, Any], Path]:
    """Start a stack, without a trainer, evaluate, stop it; returns the results and where they were written."""
    begun, config = time.monotonic(), prepared.config
    root = Path(config.output_dir)
    run_id = free_name(prepared.name, root=root)
    directory = root / run_id
    progress = Progress(name=f"runs/{run_id}")
    view = EvalView(progress)
    options, modules, config = eval_stack(prepared, directory)
    async with LocalStack(options, note=view.note, modules=modules) as stack:
        interrupts.on_second(stack.supervisor.hurry.set)
        view.note(f"starting the local stack; process logs: {directory / 'logs'}")
        await stack.start()
        async with Client(stack.address, access=stack.access) as client:
            run = await stack.guard(_evaluate(client, config, run_id, progress, view, is_plain=prepared.is_plain))
    require_success(progress, where=f"read the process logs in {directory / 'logs'}")
    return _write(prepared, run, view, directory, seconds=time.monotonic() - begun)


async def evaluate_there(prepared: PreparedEval, interrupts: Interrupts) -> tuple[dict[str, Any], Path]:
    """Submit to the server and follow; Ctrl-C detaches and the run continues."""
    begun = time.monotonic()
    progress = Progress(name=f"runs/{prepared.name}")
    view = EvalView(progress)
    async with open_client(prepared.server or "") as client:
        try:
            run = await _evaluate(client, prepared.config, prepared.name, progress, view, is_plain=prepared.is_plain)
        except asyncio.CancelledError:
            view.note(f"detached; the run continues.   stop: millrace run cancel {prepared.name}")
            raise
    require_success(progress, where=f"see its events: millrace run logs {prepared.name}")
    directory = Path(prepared.config.output_dir) / prepared.name
    return _write(prepared, run, view, directory, seconds=time.monotonic() - begun)


def eval_stack(prepared: PreparedEval, directory: Path) -> tuple[StackOptions, dict[str, str], EvalRunConfig]:
    """The stack of an evaluation: without a trainer; with an engine, and then with its address in the config.

    It lives on loopback as long as this command and has no tokens or certificates, whatever the environment says: its
    engine is played like an endpoint of others (`[client]`), which is never shown a token of ours.
    """
    config = prepared.config
    names = {"orchestrator", "env-server"} | ({"inference"} if config.client is None else set())
    engine: dict[str, str] = {}
    (http_port,) = free_ports(1)
    if config.client is None:
        engine = {
            "MILLRACE_MODEL": str(Path(config.model.name).expanduser().resolve()),
            "MILLRACE_MODEL_NAME": config.model.name,
            "MILLRACE_MAX_NUM_SEQS": str(config.max_concurrent),
        }
        config = config.model_copy(update={"client": ClientConfig(base_url=[f"http://127.0.0.1:{http_port}/v1"])})
    options = StackOptions(
        directory=directory,
        redis_url=prepared.settings.redis_url,
        redis_url_file=prepared.settings.redis_url_file,
        store_url=prepared.settings.store_url,
        prefix=prepared.settings.prefix,
        http_port=http_port,
        engine_environ=engine,
        log_level=config.log.level,
        log_json=config.log.json_logging,
        is_durable=False,  # the run ends with the stack, and its log is in the store
    )
    return options, {name: module for name, module in SERVICES.items() if name in names}, config


async def _evaluate(
    client: Client, config: EvalRunConfig, run_id: str, progress: Progress, view: EvalView, *, is_plain: bool
) -> run_pb2.Run:
    run = await client.runs.create(
        config.resolved_json(), run_id=run_id, kind=run_pb2.RUN_KIND_EVAL, request_id=str(uuid.uuid4())
    )
    progress.name, progress.uid = run.name, run.uid
    view.note(f"submitted {run.name} (uid {run.uid})")
    async with _telling(client, run.name, view, is_plain=is_plain):
        await follow(client, progress, view)
    return run


@contextlib.asynccontextmanager
async def _telling(client: Client, name: str, view: EvalView, *, is_plain: bool) -> AsyncIterator[None]:
    """While the block runs, say how far the run is: a bar on a terminal, a line every few seconds elsewhere."""
    tell = _draw if is_fancy(sys.stderr, plain=is_plain) else _say
    teller = asyncio.create_task(tell(client, name, view), name="progress of the evaluation")
    try:
        yield
    finally:
        teller.cancel()
        await asyncio.gather(teller, return_exceptions=True)


async def _draw(client: Client, name: str, view: EvalView) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("reward {task.fields[reward]}"), TimeRemainingColumn())
    with Bars(*columns, transient=True) as bars:
        bar = bars.add_task("", total=None, reward="–")
        async for now in _looks(client, name, LOOK_S):
            bars.update(bar, total=now.max_steps, completed=now.step, reward=f"{now.reward:.3f}")


async def _say(client: Client, name: str, view: EvalView) -> None:
    said = -1
    async for now in _looks(client, name, SAY_S):
        if now.step != said:
            said = now.step
            view.note(f"played {now.step}/{now.max_steps} rollouts  reward {now.reward:.3f}")


async def _looks(client: Client, name: str, period_s: float) -> AsyncIterator[run_pb2.RunProgress]:
    """How far the run is, once per period; a look that fails is left out: the follower of events says why."""
    while True:
        await asyncio.sleep(period_s)
        with contextlib.suppress(MillraceError):
            progress = (await client.runs.get(name)).progress
            if progress.max_steps:
                yield progress


def _write(
    prepared: PreparedEval, run: run_pb2.Run, view: EvalView, directory: Path, *, seconds: float
) -> tuple[dict[str, Any], Path]:
    order = [env.name for env in prepared.config.env]
    reports = [view.reports[name] for name in order if name in view.reports]
    data = results(prepared, run, reports, seconds=seconds)
    path = directory / RESULTS_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")
    return data, path
