"""The load of `scale.py`: a deployment of real orchestrators and Valkey, and workers that speak the protocol.

The workers do no work: replicas say that they serve what they are told, env-servers take groups and either keep them
for ever or append their rollouts at once, the trainer takes every batch and publishes a version for it.
"""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from millrace.config.load import validate_document
from millrace.internal.v1 import (
    env_service_pb2,
    env_service_pb2_grpc,
    play_pb2,
    policy_pb2,
    policy_service_pb2,
    policy_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from millrace.local.directory import free_port
from millrace.local.redis import EmbeddedRedis
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutStatus, Sample
from millrace.rollouts.wire import encode_rollout
from millrace.runlog import Epoch, RunLog, open_redis
from millrace.storage import open_store
from millrace_testing.orchestrator.fakes import FakeTrainer

PREFIX = "scale"
BEAT_TIMEOUT_S = 30.0
TRAINER, ENV_SERVER, REPLICA = (
    worker_service_pb2.WORKER_KIND_TRAINER,
    worker_service_pb2.WORKER_KIND_ENV_SERVER,
    worker_service_pb2.WORKER_KIND_INFERENCE,
)


def cpu_s(pid: int | None = None) -> float:
    """CPU seconds, user and system, of a process, by default of this one."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def delay_s(pid: int) -> float:
    """Seconds for which the main thread of a process was ready and had no core: what other programs took of it."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


def run_config(*, batch_size: int, group_size: int, tokens: int, async_level: int, max_steps: int | None = None) -> str:
    """The config of a run whose groups nothing but the load ends, as one JSON document."""
    document: dict[str, Any] = {
        "model": {"name": "m"},
        "seq_len": max(64, tokens),
        "orchestrator": {
            "batch_size": batch_size,
            "rollouts_per_example": group_size,
            "rollout_timeout_s": 3600.0,
            "async_level": async_level,
            "max_off_policy_steps": async_level + 8,
            "env": [{"id": "reverse-text"}],
            "sampling": {"max_tokens": 8},
        },
    }
    if max_steps is not None:
        document["max_steps"] = max_steps
    return validate_document(document).resolved_json()


def rollout(request: play_pb2.PlayGroupRequest, member: int, *, tokens: int, version: int) -> bytes:
    """An encoded rollout of random tokens, an eighth of which are the prompt."""
    rng, prompt = np.random.default_rng(request.ordinal * 1000 + member), max(1, tokens // 8)
    mask = np.ones(tokens, np.uint8)
    mask[:prompt] = 0
    sample = Sample(
        token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=-rng.random(tokens, dtype=np.float32) * mask,
        policy_spans=(PolicySpan(lineage=0, version=version, start=prompt, end=tokens),),
    )
    return encode_rollout(
        Rollout(
            run_uid=request.run_uid,
            purpose=Purpose.TRAIN,
            eval_id="",
            ordinal=request.ordinal,
            member=member,
            attempt=request.attempt,
            group_size=request.group_size,
            env=request.env.name,
            task_index=request.task_index,
            task_id=f"train/{request.task_index}",
            status=RolloutStatus.OK,
            error=None,
            samples=(sample,),
            reward=float(member % 2),
            planned_step=request.planned_step,
            dispatched_after=request.dispatched_after,
            env_server="env-server",
            seconds=1.0,
        )
    )


class Deployment:
    """Valkey, a store in a directory, and orchestrators as processes."""

    def __init__(self, directory: Path, redis: EmbeddedRedis, store_url: str = "") -> None:
        self._directory = directory
        self._redis = redis
        self.store_url = store_url or f"file://{directory}/store"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """Orchestrators by address."""

    @property
    def log(self) -> dict[str, Any]:
        """What opens a run's log."""
        return {"redis": open_redis(self._redis.url), "store": open_store(self.store_url), "prefix": PREFIX}

    @property
    def redis_pid(self) -> int:
        """The process id of Valkey."""
        assert self._redis.pid is not None
        return self._redis.pid

    def start_orchestrator(self, *, profile: str = "", address: str = "") -> str:
        """Start one more orchestrator, in cProfile if `profile` names a file; returns its address.

        That is of a free port unless one is given: of one that has ended.
        """
        address = address or f"127.0.0.1:{free_port()}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        env |= {"MILLRACE_REDIS_URL": self._redis.url, "MILLRACE_STORE_URL": self.store_url}
        env |= {"MILLRACE_PREFIX": PREFIX, "MILLRACE_LISTEN": address, "OMP_NUM_THREADS": "1"}
        options = ["-m", "cProfile", "-o", profile] if profile else []
        with (self._directory / f"{address}.log").open("wb") as out:
            self.processes[address] = subprocess.Popen(
                [sys.executable, *options, "-m", "millrace.orchestrator.main"], env=env, stdout=out, stderr=out
            )
        return address

    def listens(self, address: str) -> bool:
        """Return whether an orchestrator says that it listens."""
        return " listening " in (self._directory / f"{address}.log").read_text(errors="replace")

    def driven_by(self, address: str) -> set[str]:
        """Return the uids of the runs that an orchestrator says that it has claimed."""
        lines = (self._directory / f"{address}.log").read_text(errors="replace").splitlines()
        return {line.partition("uid=")[2].split()[0] for line in lines if " epoch acquired " in line}

    def said(self, words: str) -> int:
        """How often the orchestrators logged `words`."""
        return sum(path.read_text(errors="replace").count(words) for path in self._directory.glob("*.log"))

    def stop(self) -> None:
        """End the orchestrators."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def deployment(*, store_url: str = "") -> Iterator[Deployment]:
    """A deployment without an orchestrator, in a temporary directory; with the store there unless one is given."""
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedRedis(Path(directory) / "redis", append_only="none") as redis,
    ):
        made = Deployment(Path(directory), redis, store_url)
        try:
            yield made
        finally:
            made.stop()


@dataclass
class Replica(policy_service_pb2_grpc.PolicyServiceServicer):
    """Serves each version that it is told of after `seconds`."""

    seconds: float = 0.0
    status: policy_service_pb2.PolicyStatus = field(
        default_factory=lambda: policy_service_pb2.PolicyStatus(model_name="policy", max_num_seqs=256)
    )
    told: dict[int, float] = field(default_factory=dict)
    """When it first heard of each version, by `time.monotonic`."""
    num_asked: int = 0

    async def UpdatePolicy(
        self, request: policy_service_pb2.UpdatePolicyRequest, context: grpc.aio.ServicerContext
    ) -> policy_service_pb2.UpdatePolicyResponse:
        """Take a version."""
        self.told.setdefault(request.policy.version, time.monotonic())
        await asyncio.sleep(self.seconds)
        self.status = policy_service_pb2.PolicyStatus(
            run_uid=request.run_uid,
            state=policy_service_pb2.POLICY_STATE_SERVING,
            has_version=True,
            lineage=request.policy.lineage,
            version=request.policy.version,
            model_name="policy",
            max_num_seqs=256,
        )
        return policy_service_pb2.UpdatePolicyResponse(status=self.status)

    async def GetPolicyStatus(
        self, request: policy_service_pb2.GetPolicyStatusRequest, context: grpc.aio.ServicerContext
    ) -> policy_service_pb2.GetPolicyStatusResponse:
        """Say what is served."""
        self.num_asked += 1
        return policy_service_pb2.GetPolicyStatusResponse(status=self.status)


class EnvServer(env_service_pb2_grpc.EnvServiceServicer):
    """Takes every group; ends it after `seconds` if `plays`, else never. One servicer stands for all env-servers."""

    seconds = 0.0

    def __init__(self, log: dict[str, Any], *, plays: bool, tokens: int, version: Callable[[str], int]) -> None:
        self._log, self._plays, self._tokens, self._version = log, plays, tokens, version
        self._logs: dict[str, RunLog] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.calls: Counter[str] = Counter()
        self.asked: Counter[tuple[str, int]] = Counter()
        """How often each group was asked for, by run and ordinal."""

    async def OpenEnv(
        self, request: env_service_pb2.OpenEnvRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.OpenEnvResponse:
        """Be ready."""
        self.calls["OpenEnv"] += 1
        return env_service_pb2.OpenEnvResponse(
            state=env_service_pb2.ENV_STATE_READY,
            api="v0",
            train=env_service_pb2.TaskSet(num_tasks=100_000, digest="d" * 64),
            eval=env_service_pb2.TaskSet(num_tasks=3),
        )

    async def PlayGroup(
        self, request: play_pb2.PlayGroupRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.PlayGroupResponse:
        """Take a group."""
        self.calls["PlayGroup"] += 1
        self.asked[request.run_uid, request.ordinal] += 1
        if self._plays:
            task = asyncio.create_task(self._play(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return env_service_pb2.PlayGroupResponse()

    async def ListPlaying(
        self, request: env_service_pb2.ListPlayingRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.ListPlayingResponse:
        """Name nothing: what is asked for again is played again."""
        self.calls["ListPlaying"] += 1
        return env_service_pb2.ListPlayingResponse()

    async def CancelGroups(
        self, request: env_service_pb2.CancelGroupsRequest, context: grpc.aio.ServicerContext
    ) -> env_service_pb2.CancelGroupsResponse:
        """Forget them."""
        self.calls["CancelGroups"] += 1
        return env_service_pb2.CancelGroupsResponse()

    async def _play(self, request: play_pb2.PlayGroupRequest) -> None:
        if request.run_uid not in self._logs:
            self._logs[request.run_uid] = await RunLog.open(**self._log, uid=request.run_uid)
        version = self._version(request.base_url)
        await asyncio.sleep(self.seconds)
        data = [rollout(request, member, tokens=self._tokens, version=version) for member in request.members]
        (await self._logs[request.run_uid].append_rollouts(data)).require("rollouts")


@dataclass
class _Life:
    """What a worker keeps across its connections, as `rpc/worker.py` does: it registers again only when told to."""

    is_registered: bool = False
    interval_s: float = 1.0


class Fleet:
    """Workers that register and send heartbeats over connections of their own, and what they saw."""

    def __init__(self, addresses: list[str], log: dict[str, Any], *, plays: bool = False, tokens: int = 100) -> None:
        """Take the orchestrators' addresses; a worker keeps to one of them as long as that answers."""
        self._addresses, self._log = addresses, log
        self.replicas: list[Replica] = []
        self._by_url: dict[str, Replica] = {}
        self.trainers: list[FakeTrainer] = []
        self.env_server = EnvServer(log, plays=plays, tokens=tokens, version=self._version)
        self.latencies_s: list[float] = []
        self.num_registered = 0
        self.num_registered_again = 0
        """Workers that were told to register again, from the start to the end."""
        self.all_failures: Counter[str] = Counter()
        """Calls that failed from the start to the end, by status and the words that came with it."""
        self._num_started = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._servers: list[grpc.aio.Server] = []

    def _version(self, base_url: str) -> int:
        """Return the version that the replica at an address serves."""
        replica = self._by_url.get(base_url)
        return 0 if replica is None else replica.status.version

    async def start(self, *, replicas: int, env_servers: int, trainers: int = 1, update_s: float = 0.0) -> None:
        """Add workers, which begin within a second or so."""
        env_address = await self._serve(env_service_pb2_grpc.add_EnvServiceServicer_to_server, self.env_server)
        for _ in range(trainers):
            trainer = FakeTrainer(self._log, worker_id=f"trainer-{self._num_started:05d}")
            self.trainers.append(trainer)
            self._begin(TRAINER, trainer.worker_id, "", trainer.report, trainer.on_assignments)
        for _ in range(replicas):
            replica = Replica(update_s)
            self.replicas.append(replica)
            address = await self._serve(policy_service_pb2_grpc.add_PolicyServiceServicer_to_server, replica)

            self._by_url[f"http://{address}/v1"] = replica

            def report(replica: Replica = replica) -> worker_service_pb2.HeartbeatRequest:
                return worker_service_pb2.HeartbeatRequest(policy=replica.status)

            self._begin(REPLICA, f"inference-{self._num_started:05d}", address, report)
        for _ in range(env_servers):
            self._begin(
                ENV_SERVER,
                f"env-server-{self._num_started:05d}",
                env_address,
                lambda: worker_service_pb2.HeartbeatRequest(num_playing=self.env_server.calls["PlayGroup"] % 64),
            )

    async def _serve(self, add: Callable[[Any, grpc.aio.Server], None], servicer: object) -> str:
        server = grpc.aio.server()
        add(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._servers.append(server)
        return address

    def _begin(
        self,
        kind: worker_service_pb2.WorkerKind,
        worker_id: str,
        address: str,
        report: Callable[[], worker_service_pb2.HeartbeatRequest],
        hear: Callable[[worker_service_pb2.HeartbeatResponse], Any] = lambda reply: None,
    ) -> None:
        http_url = f"http://{address}/v1" if kind == REPLICA else ""
        worker = worker_service_pb2.Worker(
            worker_id=worker_id, kind=kind, address=address, http_url=http_url, capacity=64, slot=f"slot-{worker_id}"
        )
        self._tasks.append(asyncio.create_task(self._live(worker, report, hear, self._num_started)))
        self._num_started += 1

    async def _live(
        self,
        worker: worker_service_pb2.Worker,
        report: Callable[[], worker_service_pb2.HeartbeatRequest],
        hear: Callable[[worker_service_pb2.HeartbeatResponse], Any],
        number: int,
    ) -> None:
        await asyncio.sleep(number % 997 / 500)  # else all would speak at the same moments
        turn, options = number, [("grpc.use_local_subchannel_pool", 1)]
        life = _Life()
        while True:
            address = self._addresses[turn % len(self._addresses)]
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                try:
                    await self._speak(worker_service_pb2_grpc.WorkerServiceStub(channel), worker, report, hear, life)
                except grpc.aio.AioRpcError as error:
                    self.all_failures[f"{error.code().name}: {error.details()}"] += 1
                    turn += 1
                    await asyncio.sleep(1.0)

    async def _speak(
        self,
        stub: worker_service_pb2_grpc.WorkerServiceStub,
        worker: worker_service_pb2.Worker,
        report: Callable[[], worker_service_pb2.HeartbeatRequest],
        hear: Callable[[worker_service_pb2.HeartbeatResponse], Any],
        life: "_Life",
    ) -> None:
        while True:
            if not life.is_registered:
                request = worker_service_pb2.RegisterWorkerRequest(worker=worker)
                life.interval_s = (await stub.RegisterWorker(request, timeout=BEAT_TIMEOUT_S)).heartbeat_seconds
                life.is_registered = True
                self.num_registered += 1
            heartbeat = report()
            heartbeat.worker_id = worker.worker_id
            began = time.monotonic()
            reply = await stub.Heartbeat(heartbeat, timeout=BEAT_TIMEOUT_S)
            took = time.monotonic() - began
            self.latencies_s.append(took)
            life.is_registered = not reply.register_again
            self.num_registered_again += reply.register_again
            life.interval_s = reply.heartbeat_seconds or life.interval_s
            if life.is_registered:
                hear(reply)
            await asyncio.sleep(life.interval_s)

    def reset(self) -> None:
        """Begin to count anew."""
        self.latencies_s.clear()
        self.env_server.calls.clear()
        self.num_registered = 0

    async def stop(self) -> None:
        """End every worker."""
        ending = [*self._tasks, *(trainer.task for trainer in self.trainers if trainer.task is not None)]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*(server.stop(0) for server in self._servers))


@asynccontextmanager
async def fleet(addresses: list[str], log: dict[str, Any], *, plays: bool = False) -> AsyncIterator[Fleet]:
    """A fleet without workers, which ends with the block."""
    made = Fleet(addresses, log, plays=plays)
    try:
        yield made
    finally:
        await made.stop()


async def publish(log: RunLog, version: int) -> None:
    """Publish a version as the trainer of the run does, under its epoch."""
    key, digest = log.names.policy_manifest(0, version), f"{version:064x}"
    manifest = json.dumps({"digest": digest}).encode()
    await asyncio.to_thread(log.store.create, key, manifest)
    entry = policy_pb2.PolicyEntry(
        version=version, manifest_key=key, manifest_sha256=hashlib.sha256(manifest).digest(), digest=digest
    )
    epoch = Epoch("trainer", await log.current_epoch("trainer"))
    (await log.append_policy(epoch, entry.SerializeToString(), version)).require("policy")


async def until(is_true: Callable[[], bool | Awaitable[bool]], *, timeout_s: float) -> bool:
    """Look every tenth of a second; whether it became true in time."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        found = is_true()
        if found if isinstance(found, bool) else await found:
            return True
        await asyncio.sleep(0.1)
    return False
