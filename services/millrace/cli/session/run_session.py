"""Run `millrace rl` from submission to summary: on a local stack that ends with the run, or on a server."""

import asyncio
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.cli.connection import OUTPUTS, open_client
from millrace.cli.errors import CliError
from millrace.cli.interrupts import Interrupts
from millrace.cli.session.follow import MetricsFile, follow, require_success, ticking, until_given_back
from millrace.cli.session.prepare import Prepared, choose_run_id
from millrace.cli.session.results import collect, phases_of, summary, write_summary
from millrace.cli.view.progress import Progress
from millrace.cli.view.view import ProgressView, make_view
from millrace.client import Client
from millrace.config.sections.inference import InferenceConfig
from millrace.config.sections.rl import RLConfig
from millrace.errors import AlreadyExistsError, NotFoundError, UnavailableError
from millrace.runlog.names import MAX_NAME
from millrace.telemetry import waits
from millrace.v1 import run_pb2

if TYPE_CHECKING:
    from millrace.local.stack import StackOptions

SUMMARY_NAME = "summary.json"
SUBMIT_DEADLINE_S = 60.0
SUBMIT_PAUSE_S = 1.0


async def run_local(prepared: Prepared, interrupts: Interrupts) -> tuple[dict[str, Any], Path]:
    """Start a local stack, train, and stop the stack; return the summary and its path. No process is left in any case.

    Raises CliError if the run fails, ProcessDiedError if a service crashes repeatedly.
    """
    from millrace.local.stack import LocalStack  # not part of millrace[client]

    begun = time.monotonic()
    config = prepared.config
    root = Path(config.output_dir)
    run_id = choose_run_id(config, prepared.name, root=root)
    home = directory = root / run_id
    if prepared.settings.store_url is None:  # else the server knows its runs
        home = _home(prepared, run_id, root=root)
    progress = _progress(prepared, f"runs/{run_id}")
    phases: dict[str, float] = {}
    with make_view(progress, plain=prepared.is_plain) as view:
        async with ticking(view):
            try:
                options = await planned_stack(prepared, home, note=view.note)
                async with LocalStack(options, note=view.note) as stack:
                    interrupts.on_second(stack.supervisor.skip_grace.set)
                    view.note(f"starting the local stack; process logs: {home / 'logs'}")
                    await stack.start()
                    phases["stack_s"] = time.monotonic() - begun
                    progress.place = f"{stack.address}, dashboard at {stack.dashboard_url}"
                    view.note(_reached(stack.address, stack.dashboard_url, directory=home))
                    async with Client(stack.address, access=stack.access) as client:
                        await stack.guard(_submit_and_follow(client, prepared, progress, view, run_id))
                    directory = root / progress.name.removeprefix("runs/")
                    stopping = time.monotonic()
            except asyncio.CancelledError:
                name = progress.name.removeprefix("runs/")
                # Without a uid the run was not created yet.
                go_on = f"; to go on, give the same command with --name {name} --resume" if progress.uid else ""
                view.note(f"interrupted: all processes are stopped; the results so far are in {directory}{go_on}")
                raise
        phases["stop_s"] = time.monotonic() - stopping
    require_success(progress, logs=home / "logs")
    store_url = prepared.settings.store_url
    return await _finish(progress, directory, begun=begun, phases=phases, store_url=store_url)


async def run_remote(prepared: Prepared, interrupts: Interrupts) -> tuple[dict[str, Any], Path]:
    """Submit the run to the server and follow it; return the summary and its path.

    Ctrl-C detaches, and the run continues.
    """
    begun = time.monotonic()
    root = Path(prepared.config.output_dir)
    progress = _progress(prepared, "")
    async with open_client(prepared.server or "") as client:
        with make_view(progress, plain=prepared.is_plain) as view:
            run = await begin_remote(client, prepared, note=view.note)
            _adopt(progress, run)
            view.note(submitted_line(run))
            directory = root / run.name.removeprefix("runs/")
            await follow_or_detach(client, progress, view, directory=directory)
    require_success(progress)
    return await _finish(progress, directory, begun=begun, phases={}, store_url=prepared.settings.store_url)


# A run that is there already: resumed (`--resume`), forked (`--ckpt.resume_step K`), or left alone; never doubled.
#
# The log of a run is never rewritten. A step below its newest one is therefore the beginning of a new run, its fork.

Note = Callable[[str], None]

NEWEST = -1
"""Value of `ckpt.resume_step` that continues a run at its newest step."""
# What a run is called and where this machine writes is no part of what is trained.
_OWN = {
    ("output_dir",),
    ("run", "name"),
    ("log",),
    ("wandb", "id"),
    ("ckpt", "resume_step"),
    ("trainer", "ckpt", "resume_step"),
}
_MAX_SHOWN = 8
_ENDED = (run_pb2.RUN_STATE_SUCCEEDED, run_pb2.RUN_STATE_CANCELLED)
_STOPPED = (run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_PAUSED)


def find_home(root: Path, name: str, *, prefix: str) -> Path | None:
    """Return the directory below `root` whose store has a run of this name; None if there is none.

    `prefix` is the deployment's in that store.
    """
    homes = [root / name, *(path for path in sorted(root.glob("*")) if path.name != name)]
    return next((home for home in homes if (home / "store" / prefix / "names" / name).is_file()), None)


def exists_error(name: str, where: str) -> CliError:
    """Return the error for a name that is taken, with the user's choices as the remedy; `where` says by which run."""
    return CliError(
        f"a run called {name!r} exists ({where})",
        hint="go on with it: the same command with --resume; begin anew at one of its steps: with "
        f"--ckpt.resume_step K, which makes a fork; or give this run another name: --name {name[: MAX_NAME - 2]}-b",
    )


async def begin(
    client: Client,
    config: RLConfig,
    *,
    name: str | None,
    resume_step: int | None,
    must_exist: bool,
    create: Callable[[], Awaitable[run_pb2.Run]],
    note: Note,
) -> run_pb2.Run:
    """Return the run to follow: a new run (`create`), an existing one that continues, or a fork of it.

    `resume_step` is None for a new run, NEWEST to continue, else the step to go on from; a step before the newest one
    makes a fork. If the run `name` does not exist, a new run begins, unless it `must_exist`. Raises CliError if nothing
    of this is possible.
    """
    if resume_step is None:
        try:
            return await create()
        except AlreadyExistsError as error:
            if error.reason != "RUN_NAME_TAKEN" or name is None:
                raise
            raise exists_error(name, f"uid {error.metadata.get('uid', 'unknown')}") from error
    if name is None:
        raise CliError("which run shall go on?", hint="name it: --name NAME (or run.name in the config file)")
    try:
        run = await client.runs.get(f"runs/{name}")
    except NotFoundError:
        if must_exist:
            raise
        note(f"there is no run {name} to go on with: it begins with step 0")
        return await create()
    differing = list(_differences(config, json.loads(run.config_json)))
    # A run that has ended, or has another config, cannot go on: only a fork can.
    is_head = resume_step in (NEWEST, run.progress.step)
    if is_head and not differing and run.state not in _ENDED:
        return await _go_on(client, run, note)
    if resume_step != NEWEST:
        return await _fork(client, run, config, step=resume_step, note=note)
    fork = f"--ckpt.resume_step {run.progress.step}"
    if run.state in _ENDED:
        raise CliError(
            f"{run.name} has ended as {_state(run)} at step {run.progress.step}: there is nothing to go on with",
            hint=f"to train on from there, fork it: {fork} --max-steps N",
        )
    shown = "; ".join(differing[:_MAX_SHOWN]) + (
        f"; and {len(differing) - _MAX_SHOWN} more" * (len(differing) > _MAX_SHOWN)
    )
    raise CliError(
        f"{run.name} was begun with another config, and a run's config never changes: {shown}",
        hint=f"leave these keys as the run has them, or fork it with the new ones: {fork}",
    )


async def _go_on(client: Client, run: run_pb2.Run, note: Note) -> run_pb2.Run:
    """Resume the run if it is stopped, and return it."""
    note(f"{run.name} goes on at step {run.progress.step} (it is {_state(run)})")
    return await client.runs.resume(run.name) if run.state in _STOPPED else run


async def _fork(client: Client, run: run_pb2.Run, config: RLConfig, *, step: int, note: Note) -> run_pb2.Run:
    """Fork the run at a step, with another config, and return the fork.

    The run itself is paused if it is still going on; it can be resumed later.
    """
    name = run.name.removeprefix("runs/")
    ending = f"-from-{step}"
    try:
        fork = await client.runs.fork(
            run.name,
            step=step,
            run_id=name[: MAX_NAME - len(ending)].rstrip("-") + ending,
            config_json=_unnamed(config),
        )
    except AlreadyExistsError as error:
        if error.reason != "RUN_NAME_TAKEN":
            raise
        taken = str(error.metadata.get("run", name + ending))
        raise exists_error(taken, f"the fork of {run.name} at step {step}") from error
    note(f"the log of {run.name} is never rewritten: {fork.name} (uid {fork.uid}) is its fork from step {step} on")
    # The fork first: where it cannot be made, the run goes on as it does.
    if run.state not in (*_ENDED, *_STOPPED):
        await client.runs.pause(run.name, reason=f"forked at step {step} as {fork.name}")
        note(f"{run.name} is paused; `millrace rl … --name {name} --resume` goes on with it")
    return fork


def _unnamed(config: RLConfig) -> str:
    """Return the resolved config without the run's name, which only one run can have."""
    return config.model_copy(update={"run": config.run.model_copy(update={"name": None})}).resolved_json()


def _state(run: run_pb2.Run) -> str:
    return run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_")


def _differences(config: RLConfig, theirs: Any) -> Iterator[str]:
    """Yield a description of each key whose value differs from `theirs`, the existing run's resolved config.

    Keys that say where results go are left out.
    """

    def walk(mine: Any, other: Any, path: tuple[str, ...]) -> Iterator[str]:
        """Yield the differences of two values at a path, key by key in tables."""
        if path in _OWN or mine == other:
            return
        if isinstance(mine, dict) and isinstance(other, dict):
            for key in sorted({*mine, *other}):
                yield from walk(mine.get(key), other.get(key), (*path, key))
        else:
            yield f"{'.'.join(path)} is {json.dumps(mine)[:80]}, the run has {json.dumps(other)[:80]}"

    return walk(json.loads(config.resolved_json()), theirs, ())


async def begin_remote(client: Client, prepared: Prepared, *, note: Note) -> run_pb2.Run:
    """Return the run to follow on a server, with the options of the command line."""
    return await begin(
        client,
        prepared.config,
        name=prepared.name,
        resume_step=prepared.resume_step,
        must_exist=prepared.must_exist,
        create=lambda: submit(client, prepared, run_id=prepared.name or ""),
        note=note,
    )


async def submit(client: Client, prepared: Prepared, *, run_id: str, request_id: str | None = None) -> run_pb2.Run:
    """Create the run on the server and return it; `run_id` is its name, empty for one that the server makes.

    A caller that retries passes the same `request_id`, so that the retry creates no second run.
    """
    return await client.runs.create(
        prepared.config.resolved_json(),
        run_id=run_id,
        request_id=request_id or str(uuid.uuid4()),
        labels=prepared.labels,
    )


async def submit_for_sure(client: Client, prepared: Prepared, view: ProgressView, *, run_id: str) -> run_pb2.Run:
    """Create the run on a local stack, and retry while its orchestrator is restarted.

    Raises UnavailableError after 60 s.
    """
    # One id for all tries: a try whose answer was lost has created the run, and the next one is answered with it.
    request_id = str(uuid.uuid4())
    ends = time.monotonic() + SUBMIT_DEADLINE_S
    with waits.waiting("the orchestrator to take the run", waits_on="orchestrator", deadline_s=SUBMIT_DEADLINE_S):
        while True:
            try:
                return await submit(client, prepared, run_id=run_id, request_id=request_id)
            except UnavailableError as error:
                if time.monotonic() > ends:
                    raise
                view.note(f"submitting again in {SUBMIT_PAUSE_S:g} s: {error.message}")
                await asyncio.sleep(SUBMIT_PAUSE_S)


async def follow_or_detach(
    client: Client, progress: Progress, view: ProgressView, *, directory: Path | None = None
) -> None:
    """Follow the run to its end. On Ctrl-C, print how to follow it again and how to cancel it.

    Metrics are written into `directory`, if it is given.
    """
    metrics = MetricsFile(directory / "metrics.jsonl") if directory else None
    try:
        queued = client.runs.reporting_queued(
            progress.name, view.note, is_queued=lambda: progress.state == run_pb2.RUN_STATE_QUEUED
        )
        async with ticking(view), queued:
            await follow(client, progress, view, metrics=metrics)
    except asyncio.CancelledError:
        name = progress.name.removeprefix("runs/")
        view.note(
            f"detached; the run continues.   reattach: millrace run watch {name}    stop: millrace run cancel {name}"
        )
        raise
    finally:
        if metrics is not None:
            metrics.close()


def submitted_line(run: run_pb2.Run) -> str:
    """Return a line such as `Submitted runs/x (uid ...)    watch: millrace run watch x`."""
    return f"submitted {run.name} (uid {run.uid})    watch: millrace run watch {run.name.removeprefix('runs/')}"


async def _submit_and_follow(
    client: Client, prepared: Prepared, progress: Progress, view: ProgressView, run_id: str
) -> None:
    """Create or continue the run on the local stack, and follow it until it has ended and its exports are written."""
    run = await begin(
        client,
        prepared.config,
        name=prepared.name,
        resume_step=prepared.resume_step,
        must_exist=prepared.must_exist,
        create=lambda: submit_for_sure(client, prepared, view, run_id=run_id),
        note=view.note,
    )
    _adopt(progress, run)
    view.note(f"submitted {run.name} (uid {run.uid})")
    metrics = MetricsFile(Path(prepared.config.output_dir) / run.name.removeprefix("runs/") / "metrics.jsonl")
    try:
        await follow(client, progress, view, metrics=metrics)
        if progress.held_up is None:
            await until_given_back(client, progress.name, note=view.note)
    finally:
        metrics.close()


def _reached(address: str, dashboard: str, *, directory: Path) -> str:
    """Return a message: how to reach the run from another terminal."""
    is_found = directory.parent == OUTPUTS
    found = "`millrace run list` and the like find it here" if is_found else f"for others: MILLRACE_SERVER={address}"
    opened = "" if is_found else f" --dir {directory}"
    return (
        f"the orchestrator listens on {address} ({found}); "
        f"the dashboard is at {dashboard} (`millrace dashboard{opened}` opens it)"
    )


def _home(prepared: Prepared, run_id: str, *, root: Path) -> Path:
    """Return the directory of the local stack.

    Raises CliError if a run of this name exists and the command does not resume it, or if it resumes one that does not
    exist.
    """
    home = find_home(root, run_id, prefix=prepared.settings.prefix)
    if home is None and prepared.must_exist:
        raise CliError(f"there is no run {run_id} under {root}", hint="leave --resume out to begin it")
    if home is not None and prepared.resume_step is None:
        raise exists_error(run_id, f"in {home}")
    if home is None and (root / run_id / SUMMARY_NAME).exists():
        raise CliError(f"{root / run_id} has the results of another run", hint="choose another --name, or move it away")
    return home or root / run_id


async def _finish(
    progress: Progress, directory: Path, *, begun: float, phases: Mapping[str, float], store_url: str | None
) -> tuple[dict[str, Any], Path]:
    """Collect the results of an ended run into `directory`; return the summary and its path.

    `begun` is when the command began, by `time.monotonic`; `phases` are seconds of its parts so far.
    """
    collecting = time.monotonic()
    artifacts = await asyncio.to_thread(collect, progress, directory, store_url=store_url)
    now = time.monotonic()
    data = summary(
        progress,
        artifacts,
        seconds=now - begun,
        phases={**phases, **phases_of(progress), "collect_s": now - collecting},
    )
    path = directory / SUMMARY_NAME
    write_summary(data, path)
    return data, path


def _progress(prepared: Prepared, name: str) -> Progress:
    """Return the progress of the run `name` before its first event, with the limits of its config."""
    config = prepared.config
    bound = config.orchestrator.max_off_policy_steps
    return Progress(name=name, max_steps=config.max_steps or 0, staleness_bound=bound)


def _adopt(progress: Progress, run: run_pb2.Run) -> None:
    progress.name, progress.uid = run.name, run.uid


async def planned_stack(prepared: Prepared, directory: Path, *, note: Callable[[str], object]) -> "StackOptions":
    """Return the options of the run's local stack, which works in `directory`.

    If vLLM and the trainer use the same GPU, vLLM's share is computed first; raises InvalidStateError if it is too
    small. `note` is called with what the user should know.
    """
    from millrace.local import gpus
    from millrace.local.gpus import engine_share

    inference, assigned = _engine_and_gpus(prepared)
    if inference.sleep_while_training and all(assigned.values()) and not gpus.are_shared(assigned):
        note("inference.sleep_while_training gains nothing here: vLLM and the trainer have GPUs of their own")
    if not _is_share_open(inference, assigned):
        return stack_options(prepared, directory)
    share = await engine_share(prepared.config, assigned, note=note)
    return stack_options(prepared, directory, engine_share=share)


def stack_options(prepared: Prepared, directory: Path, *, engine_share: float | None = None) -> "StackOptions":
    """Return the options of the run's local stack: services and addresses from the environment, engine and logs from
    the config. `engine_share` is vLLM's share of a GPU that the trainer also uses, if the config does not set it.
    """
    from millrace.inference.launch_env import engine_environ
    from millrace.local.gpus import SHARED_UTILIZATION
    from millrace.local.stack import StackOptions

    config = prepared.config
    inference, assigned = _engine_and_gpus(prepared)
    if _is_share_open(inference, assigned):
        share = SHARED_UTILIZATION if engine_share is None else engine_share
        inference = inference.model_copy(update={"gpu_memory_utilization": share})
    options = StackOptions(
        directory=directory,
        http_host=config.inference.server.host,
        http_port=config.inference.server.port,
        engine=inference.engine,
        gpus=assigned,
        engine_environ=engine_environ(inference, max_model_len=config.orchestrator.seq_len),
        log_level=config.log.level,
        log_json=config.log.json_logging,
        is_durable=False,  # the run ends with the stack, and its log is in the store
    )
    return options.with_settings(prepared.settings)


def _engine_and_gpus(prepared: Prepared) -> tuple[InferenceConfig, dict[str, tuple[int, ...]]]:
    """Return the config of the engine on this machine, and the GPUs of engine and trainer."""
    from millrace.inference.launch_env import with_engine
    from millrace.local import gpus

    config = prepared.config
    inference = with_engine(config.inference, os.environ)
    assigned = gpus.assign(
        gpus.training_gpus(),
        engine_size=inference.parallel.tp * inference.parallel.dp if inference.engine == "vllm" else 0,
        inference=config.inference_gpu_ids,
        trainer=config.trainer_gpu_ids,
    )
    return inference, assigned


def _is_share_open(inference: InferenceConfig, assigned: Mapping[str, Sequence[int]]) -> bool:
    """Return whether vLLM shares a GPU with the trainer and the config does not set vLLM's share."""
    from millrace.inference.launch_env import is_given, vllm_flags
    from millrace.local import gpus

    if inference.engine != "vllm" or not gpus.are_shared(assigned):
        return False
    return not is_given("gpu_memory_utilization", vllm_flags(inference))
