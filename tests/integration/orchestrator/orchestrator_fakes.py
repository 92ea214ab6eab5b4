"""Second implementations of the workers' protocols: they speak gRPC and the run's log like the real ones."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np

from millrace.internal.v1 import (
    batch_pb2,
    env_service_pb2,
    env_service_pb2_grpc,
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


@dataclass
class FakeReplica(policy_service_pb2_grpc.PolicyServiceServicer):
    """Serves whatever version it is told, at once."""

    worker_id: str = "inference-fake"
    address: str = ""
    status: policy_service_pb2.PolicyStatus = field(
        default_factory=lambda: policy_service_pb2.PolicyStatus(model_name="policy")
    )

    async def UpdatePolicy(self, request, context):
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
        return policy_service_pb2.GetPolicyStatusResponse(status=self.status)


@dataclass
class FakeEnvServer(env_service_pb2_grpc.EnvServiceServicer):
    """Plays a group by appending rollouts with random rewards; `broken` maps plays to a status."""

    deps: dict
    replica: FakeReplica
    worker_id: str = "env-server-fake"
    address: str = ""
    num_tasks: int = 20
    fail_open: str = ""
    delay_s: float = 0.0
    broken: dict[tuple, RolloutStatus] = field(default_factory=dict)
    """Key: (ordinal, member, attempt), with \"eval\" in front for evaluations."""
    requests: list = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    tasks: set = field(default_factory=set)

    async def OpenEnv(self, request, context):
        if self.fail_open:
            return env_service_pb2.OpenEnvResponse(
                state=env_service_pb2.ENV_STATE_FAILED, error_type="ValueError", error_message=self.fail_open
            )
        task_set = env_service_pb2.TaskSet(num_tasks=self.num_tasks, digest="d" * 64)
        return env_service_pb2.OpenEnvResponse(
            state=env_service_pb2.ENV_STATE_READY, train=task_set, eval=env_service_pb2.TaskSet(num_tasks=3), api="v0"
        )

    async def PlayGroup(self, request, context):
        self.requests.append(request)
        if not (request.purpose == rollout_pb2.PURPOSE_TRAIN and request.ordinal in self.silent):
            task = asyncio.create_task(self._play(request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return env_service_pb2.PlayGroupResponse()

    async def ListPlaying(self, request, context):
        return env_service_pb2.ListPlayingResponse()

    async def CancelGroups(self, request, context):
        return env_service_pb2.CancelGroupsResponse()

    async def _play(self, request) -> None:
        await asyncio.sleep(self.delay_s * random.random())
        log = await RunLog.open(self.deps["redis"], self.deps["store"], prefix=self.deps["prefix"], uid=request.run_uid)
        version = self.replica.status.version
        for member in request.members:
            key = (request.ordinal, member, request.attempt)
            key = ("eval", *key) if request.purpose == rollout_pb2.PURPOSE_EVAL else key
            status = self.broken.get(key, RolloutStatus.OK)
            (await log.append_rollout(encode_rollout(make_rollout(request, member, status, version)))).require(
                "rollout"
            )


def make_rollout(request, member: int, status: RolloutStatus, version: int) -> Rollout:
    ok = status == RolloutStatus.OK
    sample = Sample(
        token_ids=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], dtype=np.uint8),
        inference_logprobs=np.array([0, 0, -1, -1, -1], dtype=np.float32),
        policy_spans=(PolicySpan(lineage=0, version=version, start=2, end=5),),
    )
    return Rollout(
        run_uid=request.run_uid,
        purpose=Purpose.TRAIN if request.purpose == rollout_pb2.PURPOSE_TRAIN else Purpose.EVAL,
        eval_id=request.eval_id,
        ordinal=request.ordinal,
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
    )


class FakeTrainer:
    """Consumes batches and publishes versions; keeps the headers that it saw."""

    def __init__(self, deps: dict, *, worker_id: str = "trainer-fake") -> None:
        self.deps = deps
        self.worker_id = worker_id
        self.status = worker_service_pb2.TrainerStatus()
        self.headers: list[batch_pb2.BatchHeader] = []
        self.error: tuple[str, str] | None = None
        self.error_at_close: tuple[str, str] | None = None
        self.task: asyncio.Task | None = None
        self.hold = asyncio.Event()
        self.hold.set()

    def on_assignments(self, reply: worker_service_pb2.HeartbeatResponse) -> None:
        for assignment in reply.assignments:
            if self.status.run_uid != assignment.run_uid:
                self.status = worker_service_pb2.TrainerStatus(run_uid=assignment.run_uid)
                if self.error is not None:
                    self.status.error_reason, self.status.error_message = self.error
                else:
                    self.task = asyncio.create_task(self._train(assignment.run_uid))

    def report(self) -> worker_service_pb2.HeartbeatRequest:
        return worker_service_pb2.HeartbeatRequest(trainer=self.status)

    async def _train(self, uid: str) -> None:
        log = await RunLog.open(self.deps["redis"], self.deps["store"], prefix=self.deps["prefix"], uid=uid)
        epoch = await log.acquire_epoch("trainer", self.worker_id)
        version = 0
        while True:
            entry = policy_pb2.PolicyEntry(version=version, manifest_key=f"p/{version}", digest=f"{version:064x}")
            (await log.append_policy(epoch, entry.SerializeToString(), version)).require("policy")
            header, _, _ = await log.read_batch(version, timeout_s=60.0)
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


@asynccontextmanager
async def worker(
    orchestrator: str, kind: int, worker_id: str, *, servicer=None, adder=None, report=None, on_assignments=None
) -> AsyncIterator[str]:
    """A registered worker with its own gRPC server; yields its address."""
    server = grpc.aio.server()
    if servicer is not None:
        adder(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    agent = WorkerAgent(
        orchestrator,
        worker=worker_service_pb2.Worker(
            worker_id=worker_id, kind=kind, address=address, http_url=f"http://{address}/v1", capacity=64
        ),
        report=report or worker_service_pb2.HeartbeatRequest,
        on_assignments=on_assignments or (lambda reply: None),
    )
    stopping = asyncio.Event()
    task = asyncio.create_task(agent.run(stopping))
    try:
        yield address
    finally:
        stopping.set()
        await task
        await server.stop(0)
