"""Check a fork before it is made, as far as a client can. The server cannot do a dry run of ForkRun."""

import json
from typing import TYPE_CHECKING

from millrace.errors import AlreadyExistsError, InvalidStateError, NotFoundError
from millrace.orchestrator.new_run import check_config
from millrace.runlog.fork import ForkPlan
from millrace.runlog.records.frontier import ZERO_CHAIN_HASH, Frontier
from millrace.runlog.records.run_record import RL, RunRecord
from millrace.runlog.run_status import is_terminal

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.config import RLConfig
    from millrace.v1 import run_pb2


async def check_fork(client: "Client", parent: "run_pb2.Run", config: "RLConfig", *, step: int, name: str) -> str:
    """Check step, settings and name as the server would; return a description of what only the server can check.

    Raises InvalidStateError if the step is not available or its settings need another checkpoint, InvalidSpecError if a
    fork cannot have these settings, AlreadyExistsError if the name is taken.
    """
    saved = [int(each.step) for each in await client.runs.checkpoints(parent.name)]
    _require_kept(parent, saved, step)
    base = max((each for each in saved if each <= step), default=0)
    short = parent.name.removeprefix("runs/")
    plan = ForkPlan(
        uid=parent.uid,
        name=short,
        step=step,
        base_step=base,
        checkpoints=tuple(saved),
        chain_hash=ZERO_CHAIN_HASH,
        frontier=Frontier(),
    )
    check_config(config, _record(parent, short), plan)
    if name:
        await _require_free(client, name)
    if step > parent.progress.step:
        return (
            f"step {step} is not trained yet (it is at {parent.progress.step}): the batches before it must be committed"
        )
    return f"that the batches from step {base} on are still kept" if base < step else "nothing more"


def _require_kept(parent: "run_pb2.Run", saved: list[int], step: int) -> None:
    """Raise InvalidStateError if the step is later than all that is committed, or earlier than all that is kept."""
    orchestrator = json.loads(parent.config_json).get("orchestrator", {})
    ahead = 0 if is_terminal(parent.state) else int(orchestrator.get("async_level") or 1)
    oldest = min(saved, default=0)
    is_whole = not parent.HasField("parent")  # only a run that is no fork begins with the start model
    newest = int(parent.progress.step)
    if step > newest + ahead:
        why, remedy = f"it has {newest} steps", f"choose a step up to {newest}"
    elif step < oldest and not is_whole:
        why, remedy = f"its oldest checkpoint is that of step {oldest}", f"choose a step from {oldest} on"
    else:
        return
    raise InvalidStateError(
        f"run {parent.name.removeprefix('runs/')!r} cannot be forked at step {step}: {why}",
        reason="STEP_NOT_KEPT",
        remedy=remedy,
    )


async def _require_free(client: "Client", name: str) -> None:
    try:
        await client.runs.get(f"runs/{name}")
    except NotFoundError:
        return
    raise AlreadyExistsError(f"there is a run {name!r} already", reason="RUN_EXISTS", remedy="choose another --name")


def _record(parent: "run_pb2.Run", name: str) -> RunRecord:
    config = json.loads(parent.config_json)
    return RunRecord(uid=parent.uid, name=name, kind=RL, config=config, run_hash=parent.run_hash)
