"""A run that is there already: resumed (`--resume`), forked (`--ckpt.resume_step K`), or left alone; never doubled.

The log of a run is never rewritten. A step below its newest one is therefore the beginning of a new run, its fork.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from millrace.cli.errors import CliError
from millrace.client import Client
from millrace.config.sections.rl import RLConfig
from millrace.errors import AlreadyExistsError, NotFoundError
from millrace.runlog.run_name import MAX_NAME
from millrace.v1 import run_pb2

Note = Callable[[str], None]

NEWEST = -1
"""`ckpt.resume_step` that goes on where the run is."""
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
    """The directory of the local stack whose store has a run of this name; None if there is none."""
    homes = [root / name, *(path for path in sorted(root.glob("*")) if path.name != name)]
    return next((home for home in homes if (home / "store" / prefix / "names" / name).is_file()), None)


def exists_error(name: str, where: str) -> CliError:
    """What there is to choose for a name that is taken."""
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
    """The run to follow: a new one, one that goes on, or a fork. CliError where none of it can be."""
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
    note(f"{run.name} goes on at step {run.progress.step} (it is {_state(run)})")
    return await client.runs.resume(run.name) if run.state in _STOPPED else run


async def _fork(client: Client, run: run_pb2.Run, config: RLConfig, *, step: int, note: Note) -> run_pb2.Run:
    """A fork at a step; its parent is paused where it would go on, and can be resumed later."""
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
    if run.state not in (*_ENDED, *_STOPPED):
        await client.runs.pause(run.name, reason=f"forked at step {step} as {fork.name}")
        note(f"{run.name} is paused; `millrace rl … --name {name} --resume` goes on with it")
    return fork


def _unnamed(config: RLConfig) -> str:
    return config.model_copy(update={"run": config.run.model_copy(update={"name": None})}).resolved_json()


def _state(run: run_pb2.Run) -> str:
    return run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_")


def _differences(config: RLConfig, theirs: Any) -> Iterator[str]:
    """The keys that differ from the run's, with both values."""

    def walk(mine: Any, other: Any, path: tuple[str, ...]) -> Iterator[str]:
        if path in _OWN or mine == other:
            return
        if isinstance(mine, dict) and isinstance(other, dict):
            for key in sorted({*mine, *other}):
                yield from walk(mine.get(key), other.get(key), (*path, key))
        else:
            yield f"{'.'.join(path)} is {json.dumps(mine)[:80]}, the run has {json.dumps(other)[:80]}"

    return walk(json.loads(config.resolved_json()), theirs, ())
