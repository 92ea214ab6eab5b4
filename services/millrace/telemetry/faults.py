"""Fault points: named places in the code where a test can kill, freeze or slow the process, or make a call fail.

    faults.reach("trainer.after_publish", step=3)

costs one comparison unless `MILLRACE_FAULTS` names a directory when the process starts. There, `arm` (called by the
test) writes one file per fault; the process that reaches the point under the fault's conditions renames the file, so
each fault strikes once, in one process, and leaves a record.
"""

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from millrace.errors import UnavailableError

VARIABLE = "MILLRACE_FAULTS"
DIRECTORY = os.environ.get(VARIABLE) or None


class Point(StrEnum):
    """Every fault point. `reach` refuses others, so that a test cannot wait for a point that does not exist."""

    ORCHESTRATOR_AFTER_DISPATCH = "orchestrator.after_dispatch"
    """An env-server has taken a group (`step`: planned step)."""
    ORCHESTRATOR_AFTER_ROLLOUTS = "orchestrator.after_rollouts"
    """A group became whole; nothing is committed of it (`step`: next step to cut)."""
    ORCHESTRATOR_MID_COMMIT = "orchestrator.mid_commit"
    """The data of a batch is uploaded, its header is not (`step`)."""
    ORCHESTRATOR_AFTER_HEADER = "orchestrator.after_header"
    """The header object exists, Redis does not have it (`step`)."""
    ORCHESTRATOR_AFTER_COMMIT = "orchestrator.after_commit"
    """The batch is committed and appended, the loop does not know it yet (`step`)."""
    ORCHESTRATOR_BEFORE_SEAL = "orchestrator.before_seal"
    """The terminal state is archived, the run is not sealed."""
    ORCHESTRATOR_REOPEN_INTENT = "orchestrator.reopen_intent"
    """A resume of a failed run is stored as an intent, and nowhere else (`step`: of its closing header)."""
    ORCHESTRATOR_REOPENED = "orchestrator.reopened"
    """A failed run is reopened, neither claimed nor reported by an event (`step`: of its closing header)."""
    ORCHESTRATOR_REOPEN_QUEUED = "orchestrator.reopen_queued"
    """The event that the reopened run is queued again is in the log (`step`: of its closing header)."""
    ORCHESTRATOR_RETIRED = "orchestrator.retired"
    """The record of a pass of retention exists, and nothing of it is removed (`step`: next step to cut)."""
    ORCHESTRATOR_MID_RETIRE = "orchestrator.mid_retire"
    """Some of what a pass of retention gives up is removed (`step`: the last step or version of it)."""
    ORCHESTRATOR_CHAIN_POINT = "orchestrator.chain_point"
    """A chain point exists, and no header names it (`step`: the last that it covers)."""
    ORCHESTRATOR_EVENTS_ARCHIVED = "orchestrator.events_archived"
    """Events are archived, and Redis has not removed older ones."""
    ORCHESTRATOR_EVENTS_TRIMMED = "orchestrator.events_trimmed"
    """Redis has removed archived events."""
    ORCHESTRATOR_BATCHES_TRIMMED = "orchestrator.batches_trimmed"
    """Redis has removed batches that the newest policy was trained on (`step`: the oldest that stays)."""
    ORCHESTRATOR_PREEMPT_CHOSEN = "orchestrator.preempt_chosen"
    """A run is chosen that shall pause for another one; nothing says so."""
    ORCHESTRATOR_PREEMPT_INTENT = "orchestrator.preempt_intent"
    """The intent is stored that a run pauses for another one, and its driver has not heard of it."""
    ORCHESTRATOR_PREEMPTED = "orchestrator.preempted"
    """The event that the run is QUEUED again is written; its workers are not free."""
    ORCHESTRATOR_WORKERS_GIVEN = "orchestrator.workers_given"
    """A waiting run is given its workers, which have not heard of it; nothing is stored."""
    ORCHESTRATOR_CLAIMED = "orchestrator.claimed"
    """A run's lease and epoch are taken; no event says so, and its workers hear of it now."""
    ORCHESTRATOR_MID_EXPIRE = "orchestrator.mid_expire"
    """The log of an ended run expires in Redis, and the run is still marked as open."""
    ORCHESTRATOR_MID_UNLIST = "orchestrator.mid_unlist"
    """The marks of an ended run as open are gone from the store, and Redis still has them."""
    TRAINER_MID_BACKWARD = "trainer.mid_backward"
    """After the first micro-batch's backward pass (`step`)."""
    TRAINER_AFTER_STEP = "trainer.after_step"
    """After the optimizer step, before anything is published (`step`)."""
    TRAINER_BEFORE_UPLOAD = "trainer.before_upload"
    """A policy is encoded while training goes on, and no part of it is uploaded (`version`)."""
    TRAINER_MID_UPLOAD = "trainer.mid_upload"
    """A rank has its share of a policy uploaded (by the publishing process, if any) and unreported (`version`)."""
    TRAINER_BEFORE_MANIFEST = "trainer.before_manifest"
    """The policy's objects are uploaded, its manifest does not exist (`version`)."""
    TRAINER_AFTER_MANIFEST = "trainer.after_manifest"
    """The policy's manifest exists, the log does not announce it (`version`)."""
    TRAINER_AFTER_PUBLISH = "trainer.after_publish"
    """Published and announced, before the checkpoint (`step`)."""
    TRAINER_MID_CHECKPOINT = "trainer.mid_checkpoint"
    """Some shards of the checkpoint are uploaded, its manifest is not (`step`)."""
    TRAINER_RETIRED = "trainer.retired"
    """The record that gives up checkpoints exists, and none of them is removed (`step`: the oldest that stays)."""
    TRAINER_MID_RESUME = "trainer.mid_resume"
    """The state of a checkpoint is loaded in part (`step`)."""
    ENV_SERVER_MID_EPISODE = "env_server.mid_episode"
    """A group is being played (`step`: planned step)."""
    ENV_SERVER_BEFORE_APPEND = "env_server.before_append"
    """A rollout is finished and on disk, its append is not sent (`step`: planned step)."""
    ENV_SERVER_AFTER_APPEND = "env_server.after_append"
    """A rollout is in the log, the env-server has not noted it (`step`: planned step)."""
    INFERENCE_MID_DECODE = "inference.mid_decode"
    """The engine decoded some tokens of a batch (`version`)."""
    INFERENCE_MID_DOWNLOAD = "inference.mid_download"
    """A policy's first objects are read, the engine has nothing of it (`version`)."""
    INFERENCE_MID_APPLY = "inference.mid_apply"
    """Generation is paused and the new weights are being applied (`version`)."""


class Action(StrEnum):
    """What a fault does."""

    KILL = "kill"
    """Sends SIGKILL to its own process."""
    FREEZE = "freeze"
    """Sends SIGSTOP to its own process, which another one has to continue or to kill."""
    SLEEP = "sleep"
    """Blocks the thread for `seconds`."""
    RAISE = "raise"
    """Raises UnavailableError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One armed fault.

    It strikes at `point` when every condition of `when` is met, after `skip` times without effect.
    """

    point: Point
    action: Action = Action.KILL
    when: dict[str, int] = field(default_factory=dict)
    """Lowest value of each named number of the point, such as {"step": 3}: at step 3 or later."""
    skip: int = 0
    seconds: float = 0.0


def arm(directory: Path, fault: Fault) -> Path:
    """Write a fault for processes that were started with this directory.

    Return the path of the record that it will leave.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{fault.point.value}.json"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(asdict(fault)))
    fresh.rename(path)
    return path.with_suffix(".fired")


def reach(point: Point, **where: int) -> None:
    """Mark a fault point in the code: if a fault is armed for it and `where` meets the fault's conditions, do its
    action.

    `where` are numbers such as `step=3`. Without such a fault nothing happens.
    """
    if DIRECTORY is not None:
        _strike(Path(DIRECTORY), Point(point), where)


def _strike(directory: Path, point: Point, where: dict[str, int]) -> None:
    """Do the action of the fault that is armed in `directory` for a point, if there is one and `where` meets its
    conditions.

    Each fault strikes once, in one process, and leaves a record.
    """
    path = directory / f"{point.value}.json"
    try:
        fault = json.loads(path.read_text())
    except FileNotFoundError:
        return
    # A number that the point does not give meets no condition.
    if any(where.get(name, -1) < least for name, least in fault["when"].items()):
        return
    if fault["skip"] > 0:
        # Written anew with one `skip` less, so that the count holds over processes.
        arm(directory, Fault(**{**fault, "point": point, "action": Action(fault["action"]), "skip": fault["skip"] - 1}))
        return
    fired = path.with_suffix(".fired")
    try:
        # The rename decides which one process strikes, if several reach the point at once.
        path.rename(fired)
    except FileNotFoundError:
        return  # another process was faster
    fired.write_text(json.dumps({"pid": os.getpid(), "time": time.time(), "where": where, "action": fault["action"]}))
    match Action(fault["action"]):
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.FREEZE:
            # To this thread, which stops here with all others; sent to the process, it may run on a while.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case Action.SLEEP:
            time.sleep(fault["seconds"])
        case Action.RAISE:
            raise UnavailableError(f"fault injected at {point.value}", reason="FAULT_INJECTED")


def disarm(directory: Path) -> None:
    """Remove every armed fault and every record of this directory."""
    for path in directory.glob("*.*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
