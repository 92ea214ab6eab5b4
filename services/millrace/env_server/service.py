"""EnvService: opens environments, plays groups, answers what is being played."""

import asyncio
import logging
import os
import time
from collections.abc import Iterable

import grpc.aio

from millrace.decoding import decode_object
from millrace.env_server import play_meters
from millrace.env_server.adapters.env_args import MAX_ARGS_BYTES, parse_args
from millrace.env_server.adapters.outcome import failed, make_rollout
from millrace.env_server.adapters.tasks import canonical_json
from millrace.env_server.groups import Groups, PlayingGroup, group_key
from millrace.env_server.isolation.inherited import is_ours, worker_environ
from millrace.env_server.spool.sink import RolloutSink
from millrace.env_server.teacher.scorer import Teachers
from millrace.env_server.tokenizer_files import TokenizerFiles
from millrace.env_server.workers.pool import EnvPool, PlayAbandonedError, PoolLimits
from millrace.env_server.workers.starter import WorkerStarter
from millrace.errors import (
    CapacityError,
    CorruptObjectError,
    InvalidSpecError,
    InvalidStateError,
    MillraceError,
    UnavailableError,
    Violation,
)
from millrace.internal.v1 import env_service_pb2, env_service_pb2_grpc, rollout_pb2
from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import rollout_to_proto
from millrace.runlog.names import Names
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY = 512
# A new OpenEnv does not try a failed environment again before this time (stated in env_service.proto).
_RETRY_FAILED_S = 30.0
# ListPlaying answers that much before its caller stops to listen; without a caller's deadline after the second.
_ANSWER_BEFORE_S = 1.0
_CATCH_UP_S = 8.0
_DRAIN_POLL_S = 0.05
MAX_GROUP_SIZE = 65_536
MAX_ROLLOUT_S = 30 * 86_400.0
"""Longest deadline of a rollout."""


class EnvService(env_service_pb2_grpc.EnvServiceServicer):
    """The servicer. `worker_id` names this env-server in its rollouts."""

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
    ) -> None:
        """Without `teachers` no rollout is scored."""
        self.groups = Groups()
        self.capacity = capacity
        self.is_leaving = False
        """No new groups are taken."""
        self._sink = sink
        self._tokenizers = tokenizers
        self._teachers = teachers
        self._worker_id = worker_id
        self._limits = limits or PoolLimits()
        self._starter = starter
        self._pools: dict[bytes, EnvPool] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def num_rollouts(self) -> int:
        """Rollouts that count against the capacity: played here, or waiting for their append."""
        return self.groups.num_rollouts + self._sink.num_orphans

    @property
    def pools(self) -> list[EnvPool]:
        """The environments that were opened."""
        return list(self._pools.values())

    def forget(self, pool: EnvPool) -> None:
        """An environment that rests is unknown from now on; the next OpenEnv loads it."""
        self._pools = {key: known for key, known in self._pools.items() if known is not pool}

    async def leave(self) -> None:
        """Take nothing new; workers that end from now on are no news."""
        self.is_leaving = True
        for pool in self._pools.values():
            await pool.leave()

    async def drain(self, *, grace_s: float) -> None:
        """Take nothing new, and let what is played finish and reach the log for `grace_s` at most."""
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
        """Stop every group and every worker. What is not finished is lost; what is finished is in the spool."""
        for group in self.groups.all():
            tasks = list(group.tasks)
            self.groups.cancel(group)
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()), *self._closing)

    async def OpenEnv(
        self, request: env_service_pb2.OpenEnvRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.OpenEnvResponse:
        """Begin to load, or say where loading is."""
        return _describe(self._pool(request.env))

    async def PlayGroup(
        self, request: env_service_pb2.PlayGroupRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.PlayGroupResponse:
        """Begin to play; answers at once."""
        _check_request(request)
        self.groups.check_epoch(request.run_uid, request.epoch)
        if self.groups.is_known(group_key(request)):
            return env_service_pb2.PlayGroupResponse(already_playing=True)
        if self._teachers is not None:
            await self._teachers.require_ready(request)
            if self.groups.is_known(group_key(request)):  # asked for a second time meanwhile
                return env_service_pb2.PlayGroupResponse(already_playing=True)
        self._require_room(len(request.members))
        pool = self._ready_pool(request)
        self._begin(request, pool)
        return env_service_pb2.PlayGroupResponse(already_playing=False)

    async def ListPlaying(
        self, request: env_service_pb2.ListPlayingRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.ListPlayingResponse:
        """The run's groups, and a fence against older orchestrators.

        First the copy of the log that the request names gets what it lacks of what is kept here.
        """
        self.groups.check_epoch(request.run_uid, request.epoch)
        left_s = context.time_remaining()
        timeout_s = _CATCH_UP_S if left_s is None else max(0.0, left_s - _ANSWER_BEFORE_S)
        await self._sink.catch_up(request.run_uid, request.log_instance, timeout_s=timeout_s)
        groups = [group.to_proto() for group in self.groups.of_run(request.run_uid)]
        return env_service_pb2.ListPlayingResponse(groups=groups)

    async def CancelGroups(
        self, request: env_service_pb2.CancelGroupsRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.CancelGroupsResponse:
        """Stop groups of the run: the named ones, every attempt of them, or all."""
        self.groups.check_epoch(request.run_uid, request.epoch)
        named = {(group.purpose, group.eval_id, group.ordinal) for group in request.groups}
        stopped = 0
        for group in self.groups.of_run(request.run_uid):
            if not named or (group.request.purpose, group.request.eval_id, group.request.ordinal) in named:
                self.groups.cancel(group)
                stopped += 1
        return env_service_pb2.CancelGroupsResponse(num_cancelled=stopped)

    def _require_room(self, num_members: int) -> None:
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

    def _pool(self, env: env_service_pb2.EnvSpec) -> EnvPool:
        """The environment's pool, by id and args; one that failed long enough ago is tried again."""
        key = env.id.encode() + b"\0" + canonical_json(parse_args(env))
        pool = self._pools.get(key)
        if pool is not None and pool.failure is not None and time.monotonic() - pool.failed_at > _RETRY_FAILED_S:
            closing = asyncio.create_task(pool.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            pool = None
        if pool is None:
            pool = self._pools[key] = EnvPool(env, self._limits, self._starter)
        pool.start()
        return pool

    def _ready_pool(self, request: env_service_pb2.PlayGroupRequest) -> EnvPool:
        """The pool, if the request can be played there now."""
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
        use_train = request.use_train_tasks or request.purpose == rollout_pb2.PURPOSE_TRAIN
        tasks = pool.info.train if use_train else pool.info.eval
        if request.task_index >= tasks.num_tasks:
            which = "training" if use_train else "held-out"
            raise _invalid("task_index", request.task_index, f"the environment has {tasks.num_tasks} {which} tasks")
        if pool.info.requires_group and sorted(request.members) != list(range(request.group_size)):
            message = f"rewards compare the members of a group: all {request.group_size} must be played in one attempt"
            raise _invalid("members", list(request.members), message)
        return pool

    def _begin(self, request: env_service_pb2.PlayGroupRequest, pool: EnvPool) -> None:
        group = PlayingGroup(request=request, left=set(request.members))
        self.groups.add(group)
        together = pool.info is not None and pool.info.requires_group
        for members in [list(request.members)] if together else [[member] for member in request.members]:
            part = env_service_pb2.PlayGroupRequest()
            part.CopyFrom(request)
            del part.members[:]
            part.members.extend(members)
            task = asyncio.create_task(self._play(group, part, pool), name=f"play {request.ordinal}/{members}")
            group.tasks.add(task)
            task.add_done_callback(group.tasks.discard)

    async def _play(self, group: PlayingGroup, part: env_service_pb2.PlayGroupRequest, pool: EnvPool) -> None:
        """Play some members and append their rollouts, whatever happens."""
        with waits.of_run(part.run_uid):
            try:
                rollouts = await self._rollouts(part, pool)
            except PlayAbandonedError:
                logger.info("rollout is left to others", extra={"ordinal": part.ordinal, "run": part.run_uid})
                for member in part.members:
                    self.groups.finish_member(group, member)
                return
            await asyncio.gather(*(self._append(group, rollout) for rollout in rollouts))

    async def _append(self, group: PlayingGroup, rollout: rollout_pb2.Rollout) -> None:
        rollout.env_server = self._worker_id
        play_meters.rollout_ended(rollout)
        try:
            await self._sink.append(rollout)
        finally:
            self.groups.finish_member(group, rollout.member)

    async def _rollouts(self, part: env_service_pb2.PlayGroupRequest, pool: EnvPool) -> Iterable[rollout_pb2.Rollout]:
        try:
            tokenizer_dir = await self._tokenizers.directory(part.tokenizer_manifest_key)
            rollouts = await pool.play(part, tokenizer_dir=tokenizer_dir)
            return rollouts if self._teachers is None else await self._teachers.score(part, rollouts)
        except PlayAbandonedError:
            raise
        # A rollout that the orchestrator waits for must end; what is not a rollout's own failure is ours.
        except Exception as error:  # a rollout's edge: it ends with a typed error
            kind = error.reason if isinstance(error, MillraceError) else type(error).__name__
            logger.exception("rollout could not be played", extra={"ordinal": part.ordinal, "run": part.run_uid})
            outcome = failed(RolloutStatus.ENV_ERROR, kind, str(error))
            task_id = pool.task_id(part)
            return [
                rollout_to_proto(make_rollout(part, member=member, task_id=task_id, outcome=outcome, seconds=0.0))
                for member in part.members
            ]


def _describe(pool: EnvPool) -> env_service_pb2.OpenEnvResponse:
    if pool.failure is not None:
        return env_service_pb2.OpenEnvResponse(
            state=env_service_pb2.ENV_STATE_FAILED,
            error_type=pool.failure.error_type,
            error_message=str(pool.failure),
        )
    if pool.info is None:
        return env_service_pb2.OpenEnvResponse(state=env_service_pb2.ENV_STATE_LOADING)
    return env_service_pb2.OpenEnvResponse(
        state=env_service_pb2.ENV_STATE_READY,
        train=pool.info.train,
        eval=pool.info.eval,
        api=pool.info.api,
        requires_group=pool.info.requires_group,
    )


def _invalid(field: str, value: object, message: str) -> InvalidSpecError:
    violation = Violation(field=field, value=str(value), message=message, source="PlayGroupRequest")
    return InvalidSpecError([violation], reason="REQUEST_INVALID")


def _check_request(request: env_service_pb2.PlayGroupRequest) -> None:
    """Refuse, all at once, what could not be played."""
    wrong: list[tuple[str, object, str]] = []
    if not _is_uid(request.run_uid):  # it becomes the name of a directory
        wrong.append(("run_uid", request.run_uid[:80], "must be the uid of a run: lower-case letters, digits and '-'"))
    if request.purpose == rollout_pb2.PURPOSE_UNSPECIFIED:
        wrong.append(("purpose", request.purpose, "must be TRAIN or EVAL"))
    if not request.members:
        wrong.append(("members", "[]", "must name at least one member"))
    if not 0 < request.group_size <= MAX_GROUP_SIZE:
        wrong.append(("group_size", request.group_size, f"must be 1 to {MAX_GROUP_SIZE}"))
    elif len(set(request.members)) != len(request.members) or any(m >= request.group_size for m in request.members):
        wrong.append(
            ("members", list(request.members[:8]), f"must be distinct and below group_size {request.group_size}")
        )
    if not request.base_url:
        wrong.append(("base_url", "", "must be the engine's URL, ending in /v1"))
    if request.is_external and request.purpose == rollout_pb2.PURPOSE_TRAIN:
        message = (
            "only evaluations may be played with an endpoint that is not ours: it cannot say whose tokens it sends"
        )
        wrong.append(("is_external", True, message))
    if problem := api_key_problem(request.api_key_var):
        wrong.append(("api_key_var", request.api_key_var, problem))
    if not _is_json_object(request.sampling.extra_body_json or "{}"):
        wrong.append(("sampling.extra_body_json", request.sampling.extra_body_json[:200], "must be a JSON object"))
    if not 0 < request.rollout_timeout_seconds <= MAX_ROLLOUT_S:
        message = f"must be positive and at most {MAX_ROLLOUT_S:.0f}"
        wrong.append(("rollout_timeout_seconds", request.rollout_timeout_seconds, message))
    if not 0 <= request.sampling.temperature <= 100:
        wrong.append(("sampling.temperature", request.sampling.temperature, "must be 0 to 100"))
    if not 0 <= request.sampling.top_p <= 1:
        wrong.append(("sampling.top_p", request.sampling.top_p, "must be 0 to 1"))
    if wrong:
        violations = [Violation(field=f, value=str(v), message=m, source="PlayGroupRequest") for f, v, m in wrong]
        raise InvalidSpecError(violations, reason="REQUEST_INVALID")


def api_key_problem(variable: str) -> str:
    """Why the endpoint's key is not there, or "". What a worker must not see is no key of an endpoint either."""
    if not variable or worker_environ(os.environ).get(variable):
        return ""
    if os.environ.get(variable):
        return "names a variable that environments do not get; put the endpoint's key into one of its own"
    return _unset_problem(variable)


def teacher_key_problem(variable: str) -> str:
    """Why the teacher's key is not there, or "". Only this process asks the teacher: workers need not see the key."""
    if variable and is_ours(variable):  # a run's config names it, and the URL that it would be sent to
        return "is a variable of the deployment; put the teacher's key into one of its own"
    return "" if not variable or os.environ.get(variable) else _unset_problem(variable)


def _unset_problem(variable: str) -> str:
    return f"is not set in the env-server's environment; start it with {variable}=<the endpoint's API key>"


def _is_json_object(text: str) -> bool:
    try:
        decode_object(text, what="extra_body_json", reason="REQUEST_INVALID", max_bytes=MAX_ARGS_BYTES)
    except CorruptObjectError:
        return False
    return True


def _is_uid(text: str) -> bool:
    try:
        Names("any", text)
    except InvalidSpecError:
        return False
    return True
