"""The env-server as a process that is killed, stopped, or has a full disk, over a Redis that loses everything."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import redis.asyncio as redis_asyncio

from millrace.env_server.spool import Record, scan_file
from millrace.errors import CapacityError, UnavailableError
from millrace.internal.v1 import (
    env_service_pb2,
    env_service_pb2_grpc,
    play_pb2,
    rollout_pb2,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from millrace.local.redis import EmbeddedRedis
from millrace.orchestrator.play.env_servers import PLAY_TIMEOUT_S
from millrace.rpc.channel import call, open_channel
from millrace.runlog.names import Stream
from millrace.runlog.rebuild import open_or_rebuild
from millrace.runlog.redis.connection import open_redis
from millrace.runlog.redis.log import RunLog
from millrace.storage.local import LocalStore
from millrace.telemetry import faults
from millrace.telemetry.faults import Fault, Point
from millrace_testing.patience import patient
from millrace_testing.polling import until
from millrace_testing.processes import env_workers_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

START_S = 240.0


class Orchestrator(worker_service_pb2_grpc.WorkerServiceServicer):
    """Notes who registers and what they report; tells what the test sets."""

    def __init__(self) -> None:
        self.registered: list[worker_service_pb2.Worker] = []
        self.assignments: list[worker_service_pb2.Assignment] = []
        self.reported = worker_service_pb2.HeartbeatRequest()

    async def RegisterWorker(self, request: Any, context: Any) -> worker_service_pb2.RegisterWorkerResponse:
        self.registered.append(request.worker)
        return worker_service_pb2.RegisterWorkerResponse(heartbeat_seconds=0.2, lease_seconds=5)

    async def Heartbeat(self, request: Any, context: Any) -> worker_service_pb2.HeartbeatResponse:
        self.reported = request
        return worker_service_pb2.HeartbeatResponse(assignments=self.assignments)


@dataclass
class Place:
    """Where an env-server runs, one process after the other, and one run's log."""

    environ: dict[str, str]
    orchestrator: Orchestrator
    base_url: Callable[[str], str]
    redis: redis_asyncio.Redis
    store: LocalStore
    log: RunLog
    directory: Path
    process: asyncio.subprocess.Process | None = None
    channel: grpc.aio.Channel | None = None
    stub: Any = None
    workers: list[int] = field(default_factory=list)

    async def start(self) -> worker_service_pb2.Worker:
        """Start a process there, wait until it registers, and open the environment."""
        before = len(self.orchestrator.registered)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "millrace.env_server.main", env=self.environ
        )
        await until(lambda: len(self.orchestrator.registered) != before, timeout_s=START_S)
        worker = self.orchestrator.registered[-1]
        if self.channel is not None:
            await self.channel.close()
        self.channel = open_channel(worker.address)
        self.stub = env_service_pb2_grpc.EnvServiceStub(self.channel)
        async with asyncio.timeout(START_S):
            state = env_service_pb2.ENV_STATE_LOADING
            while state == env_service_pb2.ENV_STATE_LOADING:
                request = env_service_pb2.OpenEnvRequest(env=self.spec)
                state = (await call(self.stub.OpenEnv, request, timeout_s=60)).state
                await asyncio.sleep(0.1)
        assert state == env_service_pb2.ENV_STATE_READY
        self.workers = env_workers_of(self.process.pid)
        return worker

    spec = play_pb2.EnvSpec(name="faulty", id="faulty-v0")

    async def play(self, ordinal: int, *, mode: int = 0, size: int = 4, attempt: int = 0, step: int = 0) -> bool:
        """Ask for a group; whether it was being played already."""
        request = play_pb2.PlayGroupRequest(
            run_uid=self.log.uid,
            purpose=rollout_pb2.PURPOSE_TRAIN,
            ordinal=ordinal,
            attempt=attempt,
            members=range(size),
            group_size=size,
            env=self.spec,
            task_index=mode,
            base_url=self.base_url("ok"),
            model="policy",
            sampling=play_pb2.Sampling(temperature=1.0),
            rollout_timeout_seconds=30.0,
            epoch=1,
            planned_step=step,
        )
        return (await call(self.stub.PlayGroup, request, timeout_s=patient(PLAY_TIMEOUT_S))).already_playing

    async def resync(self, log_instance: str) -> list[play_pb2.PlayingGroup]:
        request = env_service_pb2.ListPlayingRequest(run_uid=self.log.uid, epoch=1, log_instance=log_instance)
        return list((await call(self.stub.ListPlaying, request, timeout_s=60)).groups)

    async def in_log(self) -> Counter[tuple[int, int]]:
        """Return how often each (ordinal, member) is in the rollout stream, whatever the attempt."""
        entries = await self.log.read(Stream.ROLLOUTS, count=10_000)
        rollouts = [rollout_pb2.Rollout.FromString(entry.d) for entry in entries]
        return Counter((rollout.ordinal, rollout.member) for rollout in rollouts)

    async def until_in_log(self, count: int) -> Counter[tuple[int, int]]:
        async with asyncio.timeout(120):
            while (found := await self.in_log()).total() < count:
                await asyncio.sleep(0.05)
        return found

    async def died_of(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(120):
            return await self.process.wait()

    def spooled(self) -> list[Record]:
        """Return the rollouts in the files."""
        found: list[Record] = []
        for path in self.directory.glob("*/*.rollouts"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                found += scan_file(path)[0]
        return found


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest_asyncio.fixture(loop_scope="session")
async def place(engine: Any, tmp_path: Path) -> AsyncIterator[Place]:
    orchestrator = Orchestrator()
    server = grpc.aio.server()
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(orchestrator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with EmbeddedRedis(tmp_path / "redis", append_only="none") as embedded:  # its own: a test wipes it
        redis, store = open_redis(embedded.url), LocalStore(tmp_path / "store")
        log = await RunLog.create(redis, store, "test", f"r{uuid.uuid4().hex[:12]}", b'{"run_hash": "0"}')
        environ = os.environ | {
            "MILLRACE_REDIS_URL": embedded.url,
            "MILLRACE_STORE_URL": f"file://{tmp_path}/store",
            "MILLRACE_PREFIX": "test",
            "MILLRACE_ORCHESTRATOR": f"127.0.0.1:{port}",
            "MILLRACE_LISTEN": "127.0.0.1:0",
            "MILLRACE_DRAIN_S": "0",
            "MILLRACE_GRACE_S": "5",
            "MILLRACE_SPOOL_DIR": str(tmp_path / "spool"),
            faults.VARIABLE: str(tmp_path / "faults"),
        }
        made = Place(environ, orchestrator, engine.base_url, redis, store, log, tmp_path / "spool")
        yield made
        if made.channel is not None:
            await made.channel.close()
        if made.process is not None and made.process.returncode is None:
            made.process.kill()
            await made.process.wait()
        await redis.aclose()
        await server.stop(0)


async def test_killed_with_finished_rollouts_around_their_append(place: Place, tmp_path: Path) -> None:
    """Before the append: the successor appends them before it registers. After it: the successor appends nothing."""
    await place.start()
    fired = faults.arm(tmp_path / "faults", Fault(point=Point.ENV_SERVER_BEFORE_APPEND, when={"step": 3}))
    await place.play(0, step=3)
    assert await place.died_of() == -signal.SIGKILL and fired.exists()
    kept, held = len(place.spooled()), await place.in_log()
    assert kept > held.total()  # at least the one whose append was about to be sent
    await place.start()
    found = await place.in_log()
    assert found.total() == kept and set(found.values()) == {1}
    faults.arm(tmp_path / "faults", Fault(point=Point.ENV_SERVER_AFTER_APPEND, when={"step": 4}))
    await place.play(1, step=4, size=1)
    assert await place.died_of() == -signal.SIGKILL
    await place.start()
    await place.play(2, step=4)
    found = await place.until_in_log(kept + 5)
    assert set(found.values()) == {1} and found[(1, 0)] == 1
    async with asyncio.timeout(120):  # the last heartbeat may be older than the last append
        while place.orchestrator.reported.num_playing:
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_killed_mid_episode_leaves_no_worker_and_no_rollout(place: Place, tmp_path: Path) -> None:
    await place.start()
    workers = place.workers
    assert len(workers) == 1
    faults.arm(tmp_path / "faults", Fault(point=Point.ENV_SERVER_MID_EPISODE, skip=1))
    await place.play(0, mode=11)  # long_sleep: 2 s
    assert await place.died_of() == -signal.SIGKILL
    await until(lambda: not any(map(is_running, workers)), timeout_s=120)
    assert place.spooled() == [] and not await place.in_log()


async def test_a_wiped_redis_gets_back_what_is_unresolved(place: Place) -> None:
    worker = await place.start()
    assert worker.slot.endswith(worker.address)
    for ordinal in range(6):  # one after the other: what finishes together is one file, deleted with its last rollout
        await place.play(ordinal)
        await place.until_in_log(4 * (ordinal + 1))
    resolved = worker_service_pb2.Assignment(run_uid=place.log.uid, resolved_below=2)
    place.orchestrator.assignments = [resolved]
    await until(lambda: len(place.spooled()) <= 16, timeout_s=120)
    await place.redis.flushall()
    place.log = await open_or_rebuild(place.redis, place.store, prefix="test", uid=place.log.uid, owner="test")
    assert await place.resync(await place.log.read_instance()) == []
    expected = {(ordinal, member): 1 for ordinal in range(2, 6) for member in range(4)}
    assert await place.in_log() == expected
    # And once more, while nobody is there to notice: the successor compares before it registers.
    assert place.process is not None
    place.process.kill()
    await place.died_of()
    await place.redis.flushall()
    place.log = await open_or_rebuild(place.redis, place.store, prefix="test", uid=place.log.uid, owner="test")
    await place.start()
    assert await place.in_log() == expected


@pytest.mark.long
async def test_a_full_disk_and_a_full_spool_take_no_groups_and_lose_nothing(place: Place) -> None:
    place.environ["MILLRACE_SPOOL_BYTES"] = "5000"
    await place.start()
    assert place.process is not None
    soft, hard = resource.prlimit(place.process.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    await place.play(0)
    assert await place.until_in_log(4) == {(0, member): 1 for member in range(4)}
    assert place.spooled() == []
    await until(
        lambda: any("room for 4 finished rollouts" in wait.reason for wait in place.orchestrator.reported.waits),
        timeout_s=120,
    )
    with pytest.raises(CapacityError, match="4 finished rollouts could not be written") as caught:
        await place.play(1)
    assert caught.value.reason == "SPOOL_UNWRITABLE"
    resource.prlimit(place.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
    await until(lambda: len(place.spooled()) >= 4, timeout_s=120)
    ordinal = 1
    while sum(record.size_bytes for record in place.spooled()) < 5000:
        await place.play(ordinal, size=1)
        await place.until_in_log(4 + ordinal)
        ordinal += 1
    with pytest.raises(CapacityError, match=r"finished rollouts of 1 runs .* MILLRACE_SPOOL_BYTES") as caught:
        await place.play(ordinal)
    assert caught.value.reason == "SPOOL_FULL"
    resolved = worker_service_pb2.Assignment(run_uid=place.log.uid, resolved_below=ordinal)
    place.orchestrator.assignments = [resolved]
    await until(lambda: not place.spooled(), timeout_s=120)
    assert not await place.play(ordinal)


async def test_sigterm_finishes_what_is_played_and_takes_nothing_new(place: Place) -> None:
    await place.start()
    await place.play(0, mode=11)  # long_sleep: 2 s
    assert place.process is not None and not place.orchestrator.reported.is_leaving
    place.process.send_signal(signal.SIGTERM)
    await until(lambda: place.orchestrator.reported.is_leaving, timeout_s=1.5)
    with pytest.raises(UnavailableError) as caught:
        await place.play(1)
    assert caught.value.reason == "DRAINING"
    assert [group.ordinal for group in await place.resync("")] == [0]
    async with asyncio.timeout(patient(10)):  # 2 s of play; its grace period is 5 s
        assert await place.process.wait() == 0
    assert await place.in_log() == {(0, member): 1 for member in range(4)}
    assert not any(map(is_running, place.workers))


@pytest.mark.long
async def test_two_env_servers_on_one_spool(place: Place) -> None:
    await place.start()
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millrace.env_server.main", env=place.environ, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(120):
        _, stderr = await second.communicate()
    assert second.returncode == 2 and place.process is not None
    assert f"another env-server (pid {place.process.pid}) uses the spool {place.directory}" in stderr.decode()
    assert "MILLRACE_SPOOL_DIR" in stderr.decode() and "Traceback" not in stderr.decode()
