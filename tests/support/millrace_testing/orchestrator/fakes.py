"""Second implementations of the workers' protocols: they speak gRPC and the run's log like the real ones."""

import asyncio
import contextlib
import hashlib
import json
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np

from millrace.errors import STORAGE_ERRORS, ConflictError, LogGoneError
from millrace.internal.v1 import (
    batch_pb2,
    env_service_pb2,
    env_service_pb2_grpc,
    play_pb2,
    policy_pb2,
    policy_service_pb2,
    policy_service_pb2_grpc,
    rollout_pb2,
    worker_service_pb2,
)
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutError, RolloutStatus, Sample
from millrace.rollouts.wire import encode_rollout
from millrace.rpc.worker import WorkerAgent
from millrace.runlog import RunLog
from millrace.trainer.log.client import read_batch


@dataclass
class FakeReplica(policy_service_pb2_grpc.PolicyServiceServicer):
    """Serves whatever version it is told, at once; answers nothing while `is_down`."""

    worker_id: str = "inference-fake"
    address: str = ""
    is_down: bool = False
    status: policy_service_pb2.PolicyStatus = field(
        default_factory=lambda: policy_service_pb2.PolicyStatus(model_name="policy")
    )

    async def UpdatePolicy(self, request, context):
        await self._require_up(context)
        self.status = policy_service_pb2.PolicyStatus(
            run_uid=request.run_uid,
            state=policy_service_pb2.POLICY_STATE_SERVING,
            has_version=True,
            lineage=request.policy.lineage,
            version=request.policy.version,
            model_name="policy",
        )
        return policy_service_pb2.UpdatePolicyResponse(status=self.status)

    async def GetPolicyStatus(self, request, context):
        await self._require_up(context)
        return policy_service_pb2.GetPolicyStatusResponse(status=self.status)

    async def _require_up(self, context) -> None:
        if self.is_down:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "down on purpose")


@dataclass
class FakeEnvServer(env_service_pb2_grpc.EnvServiceServicer):
    """Plays a group by appending rollouts with random rewards; `broken` maps plays to a status.

    It keeps what it has finished, and appends what the log lacks of it before it lists what it plays.
    """

    deps: dict
    replica: FakeReplica
    worker_id: str = "env-server-fake"
    slot: str = ""
    image: str = ""
    address: str = ""
    num_tasks: int = 20
    fail_open: str = ""
    fail_type: str = "ValueError"
    delay_s: float = 0.0
    broken: dict[tuple, RolloutStatus] = field(default_factory=dict)
    """Key: (ordinal, member, attempt), with \"eval\" in front for evaluations."""
    shape: Callable[[Rollout], Rollout] = lambda rollout: rollout
    """What becomes of each rollout before it is appended."""
    requests: list = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    tasks: dict = field(default_factory=dict)
    """What is being played: the request by its task."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, training groups are played and nothing of them finishes."""
    evals_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, evaluations after the first step have begun and do not finish."""
    replicas: list[FakeReplica] = field(default_factory=list)
    """Those that requests may name, where there are several."""
    spool: list[tuple[str, bytes]] = field(default_factory=list)
    """Every rollout that was appended, with the uid of its run."""
    log_instance: str = ""
    assignments: list = field(default_factory=list)
    """Those of the last heartbeat."""

    def __post_init__(self) -> None:
        self.go_on.set()
        self.evals_go_on.set()

    async def OpenEnv(self, request, context):
        if self.fail_open:
            return env_service_pb2.OpenEnvResponse(
                state=env_service_pb2.ENV_STATE_FAILED, error_type=self.fail_type, error_message=self.fail_open
            )
        task_set = env_service_pb2.TaskSet(num_tasks=self.num_tasks, digest="d" * 64)
        return env_service_pb2.OpenEnvResponse(
            state=env_service_pb2.ENV_STATE_READY, train=task_set, eval=env_service_pb2.TaskSet(num_tasks=3), api="v0"
        )

    async def PlayGroup(self, request, context):
        self.requests.append(request)
        if not (request.purpose == rollout_pb2.PURPOSE_TRAIN and request.ordinal in self.silent):
            task = asyncio.create_task(self.play(request))
            self.tasks[task] = request
            task.add_done_callback(self.tasks.pop)
        return env_service_pb2.PlayGroupResponse()

    async def ListPlaying(self, request, context):
        if request.log_instance != self.log_instance:
            log = await self._open(request.run_uid)
            held = {entry.h for entry in await log.read("rollouts", count=10_000)}
            for uid, data in self.spool:
                if uid == request.run_uid and hashlib.sha256(data).hexdigest() not in held:
                    (await log.append_rollouts([data])).require("rollout")
            self.log_instance = request.log_instance
        return env_service_pb2.ListPlayingResponse(
            groups=[_playing(each) for each in self.tasks.values() if each.run_uid == request.run_uid]
        )

    async def CancelGroups(self, request, context):
        named = {(group.purpose, group.eval_id, group.ordinal) for group in request.groups}
        for task, played in list(self.tasks.items()):
            is_named = not named or (played.purpose, played.eval_id, played.ordinal) in named
            if played.run_uid == request.run_uid and is_named:
                task.cancel()
        return env_service_pb2.CancelGroupsResponse()

    def on_assignments(self, reply: worker_service_pb2.HeartbeatResponse) -> None:
        self.assignments = list(reply.assignments)

    def plays_of(self, ordinal: int) -> list:
        """Return the requests to play a training group, in order."""
        train = rollout_pb2.PURPOSE_TRAIN
        return [request for request in self.requests if request.purpose == train and request.ordinal == ordinal]

    async def play(self, request) -> None:
        replica = next((each for each in self.replicas if each.address in request.base_url), self.replica)
        first_version = replica.status.version
        await asyncio.sleep(self.delay_s * random.random())
        if request.purpose == rollout_pb2.PURPOSE_TRAIN:
            await self.go_on.wait()
            first_version = replica.status.version
        elif "@0-" not in request.eval_id:
            await self.evals_go_on.wait()
        versions = (first_version, replica.status.version)
        for member in request.members:
            key = (request.ordinal, member, request.attempt)
            key = ("eval", *key) if request.purpose == rollout_pb2.PURPOSE_EVAL else key
            status = RolloutStatus.ENGINE_LOST if replica.is_down else self.broken.get(key, RolloutStatus.OK)
            rollout = make_rollout(request, member, status, versions, env_server=self.worker_id)
            await self.append(request.run_uid, encode_rollout(self.shape(rollout)))

    async def append(self, uid: str, data: bytes) -> None:
        """Write a rollout into a run's log, and keep it."""
        self.spool.append((uid, data))
        while True:
            try:
                (await (await self._open(uid)).append_rollouts([data])).require("rollout")
                return
            except LogGoneError:
                await asyncio.sleep(0.05)

    async def _open(self, uid: str) -> RunLog:
        return await RunLog.open(self.deps["redis"], self.deps["store"], prefix=self.deps["prefix"], uid=uid)


def _playing(request) -> play_pb2.PlayingGroup:
    return play_pb2.PlayingGroup(
        purpose=request.purpose,
        eval_id=request.eval_id,
        ordinal=request.ordinal,
        attempt=request.attempt,
        members=request.members,
        planned_step=request.planned_step,
        base_url=request.base_url,
    )


def make_rollout(
    request,
    member: int,
    status: RolloutStatus,
    version: int | tuple[int, int],
    *,
    env_server: str = "env-server-fake",
) -> Rollout:
    """Return a rollout of three sampled tokens: the first of one version, the others of another if two are given."""
    ok = status == RolloutStatus.OK
    first, last = version if isinstance(version, tuple) else (version, version)
    spans = (PolicySpan(lineage=0, version=first, start=2, end=3), PolicySpan(lineage=0, version=last, start=3, end=5))
    sample = Sample(
        token_ids=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], dtype=np.uint8),
        inference_logprobs=np.array([0, 0, -1, -1, -1], dtype=np.float32),
        policy_spans=spans if first != last else (PolicySpan(lineage=0, version=last, start=2, end=5),),
    )
    return Rollout(
        run_uid=request.run_uid,
        purpose=Purpose.TRAIN if request.purpose == rollout_pb2.PURPOSE_TRAIN else Purpose.EVAL,
        eval_id=request.eval_id,
        ordinal=request.ordinal,
        temperature=request.sampling.temperature,
        member=member,
        attempt=request.attempt,
        group_size=request.group_size,
        env=request.env.name,
        task_index=request.task_index,
        task_id=f"train/{request.task_index}",
        status=status,
        error=None if ok else RolloutError(type="ValueError", message="broken on purpose"),
        samples=(sample,) if ok else (),
        reward=float(member % 2),
        planned_step=request.planned_step,
        dispatched_after=request.dispatched_after,
        env_server=env_server,
        seconds=random.random(),
    )


class FakeTrainer:
    """Consumes batches and publishes versions; keeps the headers that it saw. Begins at step 0 whenever it begins."""

    def __init__(self, deps: dict, *, worker_id: str = "trainer-fake") -> None:
        self.deps = deps
        self.worker_id = worker_id
        self.status = worker_service_pb2.TrainerStatus()
        self.headers: list[batch_pb2.BatchHeader] = []
        self.error: tuple[str, str] | None = None
        self.error_at_close: tuple[str, str] | None = None
        self.task: asyncio.Task | None = None
        self.log_instance = ""
        self.hold = asyncio.Event()
        self.hold.set()

    def on_assignments(self, reply: worker_service_pb2.HeartbeatResponse) -> None:
        if self.status.run_uid in reply.let_go:
            self.status = worker_service_pb2.TrainerStatus()
            if self.task is not None:
                self.task.cancel()
        is_over = self.status.is_finished or bool(self.status.error_reason)
        if is_over and not reply.assignments:
            self.status = worker_service_pb2.TrainerStatus()  # the orchestrator took note of how the run ended
        for assignment in reply.assignments:
            has_restarted = bool(self.log_instance) and assignment.log_instance not in ("", self.log_instance)
            if self.status.run_uid == assignment.run_uid and (is_over or not has_restarted):
                continue
            self.log_instance = assignment.log_instance
            self.status = worker_service_pb2.TrainerStatus(run_uid=assignment.run_uid)
            if self.task is not None:
                self.task.cancel()
            if self.error is not None:
                self.status.error_reason, self.status.error_message = self.error
            else:
                self.task = asyncio.create_task(self._train(assignment.run_uid))

    def report(self) -> worker_service_pb2.HeartbeatRequest:
        return worker_service_pb2.HeartbeatRequest(trainer=self.status)

    @property
    def steps(self) -> list[batch_pb2.BatchHeader]:
        """Return each header once, in order of step, however often it was read."""
        return [header for _, header in sorted({header.step: header for header in self.headers}.items())]

    async def _train(self, uid: str) -> None:
        while True:
            try:
                await self._train_on(
                    await RunLog.open(self.deps["redis"], self.deps["store"], prefix=self.deps["prefix"], uid=uid)
                )
                return
            except (*STORAGE_ERRORS, ConflictError):
                # As a real trainer does: a refusal passes, and after a rebuild its policies are appended again.
                await asyncio.sleep(0.05)

    async def _train_on(self, log: RunLog) -> None:
        self.log_instance = await log.read_instance()  # an assignment may have come before anybody had read it
        epoch = await log.acquire_epoch("trainer", self.worker_id)
        version = 0
        while True:
            manifest_key, digest = log.names.policy_manifest(0, version), f"{version:064x}"
            manifest = json.dumps({"digest": digest}).encode()
            await asyncio.to_thread(log.store.create, manifest_key, manifest)
            entry = policy_pb2.PolicyEntry(
                version=version,
                manifest_key=manifest_key,
                manifest_sha256=hashlib.sha256(manifest).digest(),
                digest=digest,
            )
            (await log.append_policy(epoch, entry.SerializeToString(), version)).require("policy")
            header, _, _ = await read_batch(log, version, timeout_s=60.0)
            self.headers.append(header)
            if header.kind == batch_pb2.BATCH_KIND_CLOSE:
                if self.error_at_close is not None:
                    self.status.error_reason, self.status.error_message = self.error_at_close
                else:
                    self.status.is_finished = True
                return
            await self.hold.wait()
            version += 1
            self.status.step = version


_REGISTERED_WITHIN_S = 2.0


@asynccontextmanager
async def worker(
    orchestrator: str,
    kind: int,
    worker_id: str,
    *,
    servicer=None,
    adder=None,
    report=None,
    on_assignments=None,
    slot: str = "",
    image: str = "",
) -> AsyncIterator[str]:
    """Run a worker with its own gRPC server, registered if the orchestrator answers soon; yield its address."""
    server = grpc.aio.server()
    if servicer is not None:
        adder(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    agent = WorkerAgent(
        orchestrator,
        worker=worker_service_pb2.Worker(
            worker_id=worker_id,
            kind=kind,
            address=address,
            http_url=f"http://{address}/v1",
            capacity=64,
            slot=slot,
            env_image=image,
        ),
        report=report or worker_service_pb2.HeartbeatRequest,
        on_assignments=on_assignments or (lambda reply: None),
    )
    stopping = asyncio.Event()
    task = asyncio.create_task(agent.run(stopping))
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REGISTERED_WITHIN_S):
                while agent.silence_s == math.inf:
                    await asyncio.sleep(0.005)
        yield address
    finally:
        stopping.set()
        await task
        await server.stop(0)
