"""EnvService: opens environments, plays groups, lists what is being played."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import grpc.aio

from millrace.env_server import play_meters
from millrace.env_server.adapters.outcome import failed, make_rollout
from millrace.env_server.adapters.selection import canonical_json, parse_args
from millrace.env_server.interpreters import Choice, choose, require_allowed
from millrace.env_server.isolation.inherited import api_key_problem, teacher_key_problem
from millrace.env_server.own_sampling import AskedSampling, OwnSamplingError
from millrace.env_server.settings import require_image
from millrace.env_server.sink import RolloutSink
from millrace.env_server.teacher.scorer import Teachers
from millrace.env_server.tokenizer_files import TokenizerFiles
from millrace.env_server.wire import check_play, invalid_request, tasks_to_wire
from millrace.env_server.workers.pool import EnvPool, PlayAbandonedError, PoolLimits
from millrace.env_server.workers.starter import WorkerStarter
from millrace.errors import CapacityError, FencedError, InvalidStateError, MillraceError, UnavailableError
from millrace.internal.v1 import env_service_pb2, env_service_pb2_grpc, play_pb2, rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, PlayingGroup
from millrace.rollouts.requests import changed, has_train_task, loaded_as
from millrace.rollouts.types import Rollout, RolloutStatus
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY = 512
_JUDGE_KEY = "judge.api_key_var"  # as the config spells it, in the table of the environment
# A new OpenEnv does not try a failed environment again before this time (stated in env_service.proto).
_RETRY_FAILED_S = 30.0
# ListPlaying answers that much before its caller stops to listen; without a caller's deadline after the second.
_ANSWER_BEFORE_S = 1.0
_CATCH_UP_S = 8.0
_DRAIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Admits:
    """The environments that an env-server plays."""

    pythons: Sequence[str] = ()
    """Directories below which environments may name interpreters."""
    image: str = ""
    """The container image that the env-server announces, "" if none: it plays only environments that name the same."""


# The groups that are being played: their identity, what is left of them, and which were played before.

# Keys of finished groups, so that a repeated call does not play them again. At 300 bytes each this is 6 MB. Those of
# training groups are dropped once their ordinals are resolved, so that only many evaluations come so far.
MAX_FINISHED = 20_000


class GroupKey(NamedTuple):
    """Identity of a group's attempt."""

    run_uid: str
    purpose: rollout_pb2.Purpose
    eval_id: str
    ordinal: int
    attempt: int


@dataclass(eq=False, kw_only=True)
class GroupInPlay:
    """One attempt of a group. `left` are the members whose rollouts are not appended yet."""

    request: PlayGroupRequest
    left: set[int]
    began: float = field(default_factory=time.monotonic)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def key(self) -> GroupKey:
        """Return the identity of the group's attempt."""
        return group_key(self.request)

    def described(self) -> PlayingGroup:
        """Return the group as ListPlaying reports it: with the members whose rollouts are not appended yet, and its
        age.
        """
        request = self.request
        return PlayingGroup(
            purpose=request.purpose,
            eval_id=request.eval_id,
            ordinal=request.ordinal,
            attempt=request.attempt,
            members=sorted(self.left),
            age_seconds=time.monotonic() - self.began,
            planned_step=request.planned_step,
            base_url=request.base_url,
        )


def group_key(request: PlayGroupRequest) -> GroupKey:
    """Return the identity of the attempt of a group that a request asks to play."""
    return GroupKey(request.run_uid, request.purpose, request.eval_id, request.ordinal, request.attempt)


class Groups:
    """All groups of this env-server."""

    def __init__(self) -> None:
        """Begin without any group known."""
        self._playing: dict[GroupKey, GroupInPlay] = {}
        self._finished: OrderedDict[GroupKey, None] = OrderedDict()
        self._epochs: dict[str, int] = {}

    @property
    def num_rollouts(self) -> int:
        """Return the number of rollouts that are being played here or wait to be appended."""
        return sum(len(group.left) for group in self._playing.values())

    def check_epoch(self, run_uid: str, epoch: int) -> None:
        """Raise FencedError if an earlier call for the run had a newer epoch; else remember this epoch as the
        newest.
        """
        newest = self._epochs.get(run_uid, 0)
        if epoch < newest:
            raise FencedError(
                f"run {run_uid}: epoch {epoch} is older than epoch {newest}, which this env-server has seen",
                reason="EPOCH_FENCED",
                remedy="another orchestrator drives the run now; stop driving it",
            )
        self._epochs[run_uid] = epoch

    def is_known(self, key: GroupKey) -> bool:
        """Return whether this attempt of a group is being played here, or was played lately."""
        return key in self._playing or key in self._finished

    def add(self, group: GroupInPlay) -> None:
        """Add a group to those being played."""
        self._playing[group.key] = group

    def finish_member(self, group: GroupInPlay, member: int) -> None:
        """Remove a member of the group from those whose rollouts are not appended yet.

        With its last member the group is no longer being played, and remembered as finished.
        """
        group.left.discard(member)
        if not group.left and self._playing.get(group.key) is group:
            del self._playing[group.key]
            self._finished[group.key] = None
            while len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)

    def forget_finished(self, run_uid: str, *, resolved_below: int | None = None) -> None:
        """Drop the finished groups of a run that nobody asks for again, which are all where the run has ended.

        While it goes on, they are those of training with ordinals below `resolved_below`.
        """
        for key in [key for key in self._finished if key.run_uid == run_uid]:
            if resolved_below is None or (not key.eval_id and key.ordinal < resolved_below):
                del self._finished[key]

    def of_run(self, run_uid: str) -> list[GroupInPlay]:
        """Return the groups of a run that are being played here."""
        return [group for group in self._playing.values() if group.request.run_uid == run_uid]

    def all(self) -> list[GroupInPlay]:
        """Return all groups that are being played here."""
        return list(self._playing.values())

    def cancel(self, group: GroupInPlay) -> None:
        """Cancel a group's tasks and remove the group, as if it had never been asked for.

        A later request for the same attempt would play it again.
        """
        self._playing.pop(group.key, None)
        group.left.clear()
        for task in group.tasks:
            task.cancel()


class EnvService(env_service_pb2_grpc.EnvServiceServicer):
    """The gRPC service. `worker_id` names this env-server in its rollouts."""

    def __init__(
        self,
        *,
        sink: RolloutSink,
        tokenizers: TokenizerFiles,
        worker_id: str,
        starter: WorkerStarter,
        capacity: int = DEFAULT_CAPACITY,
        limits: PoolLimits | None = None,
        teachers: Teachers | None = None,
        admits: Admits | None = None,
    ) -> None:
        """Make the service.

        `sink` takes finished rollouts, `worker_id` names this env-server in them, `starter` starts env workers, and
        `tokenizers` gives them the policies' tokenizers. `capacity` is the most rollouts at once; `limits` are those of
        each environment's workers. Without `teachers` no rollout is scored by one; `admits` says which environments may
        be played.
        """
        self.groups = Groups()
        self.capacity = capacity
        self.is_leaving = False
        """Whether new groups are refused."""
        self._sink = sink
        self._tokenizers = tokenizers
        self._teachers = teachers
        self._worker_id = worker_id
        self._limits = limits or PoolLimits()
        self._starter = starter
        self.admits = admits or Admits()
        self._pools: dict[tuple[object, ...], EnvPool] = {}
        self._choices: dict[str, Choice] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def num_rollouts(self) -> int:
        """Return the number of rollouts that count against the capacity: being played, or not appended yet.

        Rollouts of a predecessor that nobody here plays are included.
        """
        return self.groups.num_rollouts + self._sink.num_orphans

    @property
    def pools(self) -> list[EnvPool]:
        """Return the pools of workers of all environments that were opened here."""
        return list(self._pools.values())

    def forget(self, pool: EnvPool) -> None:
        """Remove an environment whose workers have ended; the next OpenEnv loads it again."""
        self._pools = {key: known for key, known in self._pools.items() if known is not pool}

    def look_for_end(self, run_uid: str) -> None:
        """Cancel a run's groups and drop its data, if the store has confirmed that the run has ended.

        If not, the store is asked in the background, and a later call finds the answer.
        """
        if not self._sink.look_for_end(run_uid):
            return  # the next heartbeat says it again
        for group in self.groups.of_run(run_uid):
            self.groups.cancel(group)
        self.groups.forget_finished(run_uid)
        if self._teachers is not None:
            self._teachers.forget(run_uid)

    async def leave(self) -> None:
        """Refuse new groups from now on. Rollouts may finish, and workers that end are not started again."""
        self.is_leaving = True
        for pool in self._pools.values():
            await pool.leave()

    async def drain(self, *, grace_s: float) -> None:
        """Refuse new groups, and wait `grace_s` at most until what is being played has finished and reached the log."""
        await self.leave()
        with waits.waiting("rollouts to finish before the end", waits_on="env worker", deadline_s=grace_s):
            try:
                async with asyncio.timeout(grace_s):
                    while self.groups.num_rollouts or self._sink.num_pending:  # noqa: ASYNC110 - many things end it
                        await asyncio.sleep(_DRAIN_POLL_S)
            except TimeoutError:
                left = {"unfinished": self.groups.num_rollouts, "unappended": self._sink.num_pending}
                logger.warning("stopping before everything was played and appended", extra=left)

    async def close(self) -> None:
        """Cancel all groups and end the workers of all environments.

        Unfinished rollouts are lost; finished ones are in the spool.
        """
        for group in self.groups.all():
            # Copied: a task leaves the set when it is done.
            tasks = list(group.tasks)
            self.groups.cancel(group)
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()), *self._closing)

    async def OpenEnv(
        self, request: env_service_pb2.OpenEnvRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.OpenEnvResponse:
        """Begin to load an environment, if it is not loaded, and answer its state: loading, ready, or failed with the
        error.

        An environment that declares sampling which the request's `sampling` does not allow counts as failed, too.
        Raises InvalidSpecError if a variable for a key is unset, or the interpreter or image is refused.
        """
        wrong = [
            ("api_key_var", request.api_key_var, api_key_problem(request.api_key_var)),
            ("teacher_key_var", request.teacher_key_var, teacher_key_problem(request.teacher_key_var)),
            (_JUDGE_KEY, request.env.judge_key_var, api_key_problem(request.env.judge_key_var)),
        ]
        if wrong := [each for each in wrong if each[2]]:
            raise invalid_request(wrong, source="OpenEnvRequest")
        env, choice = await self._placed(request.env)
        pool = self._pool(env)
        if request.HasField("sampling") and pool.info is not None:
            try:
                AskedSampling(env, request.sampling).require_declared(pool.info.declared)
            except OwnSamplingError as error:
                return _failed(error.error_type, str(error))
        return _describe(pool, choice)

    async def PlayGroup(
        self, request: play_pb2.PlayGroupRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.PlayGroupResponse:
        """Begin to play a group and answer at once; an attempt that is known already is not begun again.

        Raises FencedError for an old epoch, InvalidSpecError for a malformed request, CapacityError without room or
        while the run's teacher is not ready, UnavailableError while this env-server leaves or the environment is being
        loaded, and InvalidStateError if the environment has failed.
        """
        check_play(request)
        self.groups.check_epoch(request.run_uid, request.epoch)
        # The interpreter is part of the environment's identity, so it is chosen before the pool is looked up.
        play = changed(request, env=(await self._placed(request.env))[0])
        self.groups.check_epoch(play.run_uid, play.epoch)  # another orchestrator may have asked meanwhile
        if not self.groups.is_known(group_key(play)) and self._teachers is not None:
            await self._teachers.require_ready(play)
            self.groups.check_epoch(play.run_uid, play.epoch)  # another orchestrator may have asked what is played here
        if self.groups.is_known(group_key(play)):  # perhaps asked for a second time meanwhile
            return env_service_pb2.PlayGroupResponse(already_playing=True)
        # No await from here to `_begin`, so the room that is found here cannot be taken by another call.
        self._require_room(len(play.members))
        pool = self._ready_pool(play)
        self._sink.note_driven(play.run_uid)
        self._begin(play, pool)
        return env_service_pb2.PlayGroupResponse(already_playing=False)

    async def ListPlaying(
        self, request: env_service_pb2.ListPlayingRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.ListPlayingResponse:
        """Answer the run's groups that are being played here, and refuse calls of older orchestrators from now on.

        First the copy of the log that the request names gets the run's rollouts that are kept here and not in it.
        Raises UnavailableError if that takes longer than the caller waits.
        """
        self.groups.check_epoch(request.run_uid, request.epoch)
        left_s = context.time_remaining()
        timeout_s = _CATCH_UP_S if left_s is None else max(0.0, left_s - _ANSWER_BEFORE_S)
        await self._sink.catch_up(request.run_uid, request.log_instance, timeout_s=timeout_s)
        groups = [group.described() for group in self.groups.of_run(request.run_uid)]
        return env_service_pb2.ListPlayingResponse(groups=groups)

    async def CancelGroups(
        self, request: env_service_pb2.CancelGroupsRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.CancelGroupsResponse:
        """Cancel groups of the run, every attempt of those named, or all if none is named; answer how many were being
        played.

        Raises FencedError for an old epoch.
        """
        self.groups.check_epoch(request.run_uid, request.epoch)
        named = {(int(group.purpose), group.eval_id, group.ordinal) for group in request.groups}
        stopped = 0
        for group in self.groups.of_run(request.run_uid):
            played = group.request
            if not named or (int(played.purpose), played.eval_id, played.ordinal) in named:
                self.groups.cancel(group)
                stopped += 1
        return env_service_pb2.CancelGroupsResponse(num_cancelled=stopped)

    def _require_room(self, num_members: int) -> None:
        """Raise UnavailableError while leaving, and CapacityError if the spool or the capacity has no room for more
        rollouts.
        """
        if self.is_leaving:
            raise UnavailableError(
                "this env-server is shutting down", reason="DRAINING", remedy="play the group on another env-server"
            )
        self._sink.spool.require_room()
        num_playing = self.num_rollouts
        if num_playing + num_members > self.capacity:
            raise CapacityError(
                f"this env-server plays {num_playing} rollouts (or waits to append them) and its capacity is "
                f"{self.capacity}; {num_members} more do not fit",
                reason="ENV_SERVER_FULL",
                remedy="wait for groups to finish, use another env-server, or raise MILLRACE_ENV_CAPACITY",
            )

    async def _placed(self, env: EnvSpec) -> tuple[EnvSpec, Choice]:
        """Return the environment with its interpreter, named or chosen, and the choice.

        Raises InvalidSpecError if no interpreter fits. An interpreter is chosen anew for an environment that failed
        long enough ago, because packages may have been installed since; its failed pools are closed.
        """
        if env.python:
            return env, Choice(python=env.python)
        stale = [pool for pool in self.pools if pool.env.id == env.id and _is_to_try_again(pool)]
        choice = self._choices.get(env.id)
        if choice is None or stale:
            choice = await asyncio.to_thread(choose, env.id, self.admits.pythons)
            if choice != self._choices.get(env.id):
                self._choices[env.id] = choice
                if choice.why:
                    logger.info("an interpreter is chosen", extra={"env": env.id, "why": choice.why})
            for pool in stale:
                self._drop(pool)
        return changed(env, python=choice.python), choice

    def _drop(self, pool: EnvPool) -> None:
        """Remove an environment's pool and close it in the background; the next OpenEnv makes another one."""
        self.forget(pool)
        closing = asyncio.create_task(pool.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _pool(self, env: EnvSpec) -> EnvPool:
        """Return the environment's pool of workers, made and started if necessary; one that failed long enough ago is
        replaced.

        Raises InvalidSpecError for an interpreter that this env-server may not use, or another image than its own.
        """
        require_image(env.image, self.admits.image)
        require_allowed(env.python, self.admits.pythons)
        key = (*loaded_as(env), canonical_json(parse_args(env)))
        pool = self._pools.get(key)
        if pool is not None and _is_to_try_again(pool):
            self._drop(pool)
            pool = None
        if pool is None:
            pool = self._pools[key] = EnvPool(env, self._limits, self._starter)
        pool.start()
        return pool

    def _ready_pool(self, request: PlayGroupRequest) -> EnvPool:
        """Return the pool of the request's environment, if it can be played now.

        Raises InvalidStateError if it failed, UnavailableError while it loads, and InvalidSpecError for a task that it
        does not have or an incomplete group of compared members.
        """
        pool = self._pool(request.env)
        if pool.failure is not None:
            raise InvalidStateError(
                f"environment {request.env.id!r} is FAILED: {pool.failure.error_type}: {pool.failure}",
                reason="ENV_FAILED",
                remedy="correct what it names; it is tried again after 30 s",
            )
        if pool.info is None:
            raise UnavailableError(
                f"environment {request.env.id!r} is still being loaded",
                reason="ENV_LOADING",
                remedy="call OpenEnv until it answers READY",
            )
        num_tasks = len(pool.info.tasks(request))
        if request.task_index >= num_tasks:
            which = "training" if has_train_task(request) else "held-out"
            message = f"the environment has {num_tasks} {which} tasks"
            raise invalid_request([("task_index", request.task_index, message)])
        if pool.info.requires_group and sorted(request.members) != list(range(request.group_size)):
            message = f"rewards compare the members of a group: all {request.group_size} must be played in one attempt"
            raise invalid_request([("members", list(request.members), message)])
        return pool

    def _begin(self, request: PlayGroupRequest, pool: EnvPool) -> None:
        """Start to play the group's members, each in a task of its own, or all in one if their rewards are compared."""
        group = GroupInPlay(request=request, left=set(request.members))
        self.groups.add(group)
        together = pool.info is not None and pool.info.requires_group
        for members in [list(request.members)] if together else [[member] for member in request.members]:
            part = changed(request, members=members)
            task = asyncio.create_task(self._play(group, part, pool), name=f"play {request.ordinal}/{members}")
            group.tasks.add(task)
            task.add_done_callback(group.tasks.discard)

    async def _play(self, group: GroupInPlay, part: PlayGroupRequest, pool: EnvPool) -> None:
        """Play the members of `part`, which are of the group, and append their rollouts, failed ones too.

        An abandoned play appends none, and its members are finished here.
        """
        with waits.of_run(part.run_uid):
            try:
                rollouts = await self._rollouts(part, pool)
            except PlayAbandonedError:
                logger.info("rollout is left to others", extra={"ordinal": part.ordinal, "run": part.run_uid})
                for member in part.members:
                    self.groups.finish_member(group, member)
                return
            await asyncio.gather(*(self._append(group, rollout) for rollout in rollouts))

    async def _append(self, group: GroupInPlay, rollout: Rollout) -> None:
        """Append a rollout to the log, however long that takes, and then finish its member."""
        rollout = replace(rollout, env_server=self._worker_id)
        play_meters.rollout_ended(rollout)
        try:
            await self._sink.append(rollout)
        finally:
            self.groups.finish_member(group, rollout.member)

    async def _rollouts(self, part: PlayGroupRequest, pool: EnvPool) -> Sequence[Rollout]:
        """Play the members of `part` in the pool, have the run's teacher score them, and return one rollout for each.

        Any error makes them failures of infrastructure. Raises PlayAbandonedError while the env-server leaves.
        """
        try:
            tokenizer_dir = await self._tokenizers.directory(part.tokenizer_manifest_key)
            rollouts = await pool.play(part, tokenizer_dir=tokenizer_dir)
            return rollouts if self._teachers is None else await self._teachers.score(part, rollouts)
        except PlayAbandonedError:
            raise
        # A rollout that the orchestrator waits for must end; an error that is not the rollout's own is infrastructure.
        except Exception as error:  # a rollout's edge: it ends with a typed error
            kind = error.reason if isinstance(error, MillraceError) else type(error).__name__
            logger.exception("rollout could not be played", extra={"ordinal": part.ordinal, "run": part.run_uid})
            outcome = failed(RolloutStatus.ENV_ERROR, kind, str(error), is_infrastructure=True)
            task_id = pool.task_id(part)
            return [
                make_rollout(part, member=member, task_id=task_id, outcome=outcome, seconds=0.0)
                for member in part.members
            ]


def _failed(kind: str, message: str, remedy: str = "") -> env_service_pb2.OpenEnvResponse:
    """Return the answer that an environment has failed, with the error's type, message and remedy."""
    return env_service_pb2.OpenEnvResponse(
        state=env_service_pb2.ENV_STATE_FAILED, error_type=kind, error_message=message, error_remedy=remedy
    )


def _is_to_try_again(pool: EnvPool) -> bool:
    """Return whether the environment has failed more than `_RETRY_FAILED_S` ago."""
    return pool.failure is not None and time.monotonic() - pool.failed_at > _RETRY_FAILED_S


def _describe(pool: EnvPool, choice: Choice) -> env_service_pb2.OpenEnvResponse:
    """Return the answer with the environment's state: failed, loading, or ready with its task sets."""
    if pool.failure is not None:
        return _failed(pool.failure.error_type, str(pool.failure), pool.failure.remedy)
    if pool.info is None:
        return env_service_pb2.OpenEnvResponse(state=env_service_pb2.ENV_STATE_LOADING)
    return env_service_pb2.OpenEnvResponse(
        state=env_service_pb2.ENV_STATE_READY,
        train=tasks_to_wire(pool.info.train),
        eval=tasks_to_wire(pool.info.eval),
        api=pool.info.api,
        requires_group=pool.info.requires_group,
        played_in=choice.why,
    )
