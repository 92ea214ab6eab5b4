"""What a distant store costs: commits, a takeover and policy updates through a proxy that holds back every byte.

For each latency a server of the S3 protocol (moto, in a process of its own) is asked through a proxy that delivers what
it gets, in both directions, after half of it. First commits are made by this process, and the run is restored and its
log rebuilt; then an orchestrator drives a run whose groups end at once, is killed by `kill -9`, and another takes over.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from report import progress, table
from scale_commits import make_header
from scale_load import Deployment, deployment, fleet, free_port, run_config, until

from millrace.local.redis import EmbeddedRedis
from millrace.rpc.channel import call, open_channel
from millrace.runlog import RunLog, Stream, chain_hash, commit_batch, new_uid, open_redis
from millrace.runlog.rebuild import open_or_rebuild
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.run_record import RunRecord, load_origin
from millrace.runlog.recover import load_history
from millrace.storage import open_store
from millrace.v1 import run_pb2, run_service_pb2, run_service_pb2_grpc

BUCKET, SUPPORT = "scale", Path(__file__).resolve().parents[1] / "tests" / "support"
READY_S, COMMITS, STEPS = 120.0, 12, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("latencies_ms", type=float, nargs="*", default=[0.0, 5.0, 50.0], help="of a round trip")


def report(options: argparse.Namespace) -> str:
    """Measure each latency; the table as Markdown."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret"}
    rows = []
    with _s3_server() as upstream:
        for latency_ms in options.latencies_ms:
            progress(f"{latency_ms:g} ms")
            with _proxy(upstream, latency_ms / 2000) as port:
                url = f"s3://{BUCKET}/t{secrets.token_hex(4)}?endpoint=http://127.0.0.1:{port}&region=us-east-1"
                rows.append([f"{latency_ms:g}", *asyncio.run(_measure_log(url)), *asyncio.run(_measure_run(url))])
    header = [
        "round trip ms", "commit s", "restore s", "rebuild s", "step s", "policy told after s", "served by all after s",
        "next step after kill -9 s",
    ]  # fmt: skip
    return "## A distant store\n\n" + table(header, rows)


async def _measure_log(url: str) -> list[object]:
    """Return the median seconds of a commit, and the seconds of restoring the run and of rebuilding its log."""
    store = open_store(url)
    await asyncio.to_thread(store.ensure_bucket)  # type: ignore[attr-defined] - an S3 store
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_redis())
        redis, uid = open_redis(server.url), new_uid()
        record = RunRecord(
            uid=uid, name="r", kind="RL", config={}, run_hash="ab" * 32, create_time="2026-01-01T00:00:00Z"
        )
        log = await RunLog.create(redis, store, "scale", uid, record.encode())
        epoch, known = await log.acquire_epoch("orchestrator", "scale"), KnownObjects()
        chain, seconds = (await asyncio.to_thread(load_origin, store, log.names)).chain_hash, list[float]()
        for step in range(COMMITS):
            header, chunks = make_header(log, step, chain, 64)
            began = time.perf_counter()
            stored = await commit_batch(log, epoch, header, chunks, b"archive", known=known)
            seconds.append(time.perf_counter() - began)
            chain = chain_hash(chain, stored)
        began = time.perf_counter()
        await load_history(log)
        restored = time.perf_counter()
        await redis.flushall()
        await open_or_rebuild(redis, store, prefix="scale", uid=uid, owner="scale")
        found = [statistics.median(seconds), restored - began, time.perf_counter() - restored]
        await redis.aclose()
    return [f"{each:.3f}" for each in found]


async def _measure_run(url: str) -> list[object]:
    """Return the seconds of a step, from a version's entry to the first and the last replica, and of a takeover."""
    with deployment(store_url=url) as made:
        address = made.start_orchestrator()
        await until(lambda: made.listens(address), timeout_s=READY_S)
        async with fleet([address], made.log, plays=True) as load:
            await load.start(replicas=4, env_servers=2)
            uid = await _create(address)
            log = await RunLog.open(**made.log, uid=uid)
            seen: dict[int, float] = {}
            watching = asyncio.create_task(_watch(log, seen))
            await _steps(log, 2, READY_S)
            began = time.monotonic()
            await _steps(log, 2 + STEPS, READY_S)
            step_s = (time.monotonic() - began) / STEPS
            taken = await _take_over(made, log, address)
            watching.cancel()
            versions = [each for each in seen if all(each in replica.told for replica in load.replicas)]
            told = [[replica.told[each] - seen[each] for replica in load.replicas] for each in versions]
    first, last = (statistics.median(map(of, told)) if told else float("nan") for of in (min, max))
    return [f"{step_s:.2f}", f"{first:.3f}", f"{last:.3f}", f"{taken:.1f}"]


async def _create(address: str) -> str:
    config = run_config(batch_size=8, group_size=4, tokens=100, async_level=1)
    async with open_channel(address) as channel:
        stub = run_service_pb2_grpc.RunServiceStub(channel)
        request = run_service_pb2.CreateRunRequest(kind=run_pb2.RUN_KIND_RL, config_json=config, run_id="scale")
        return (await call(stub.CreateRun, request, timeout_s=60.0)).run.uid


async def _watch(log: RunLog, seen: dict[int, float]) -> None:
    """Note when each version is announced in Redis."""
    while True:
        version = await log.next_position(Stream.POLICIES) - 1
        seen.setdefault(version, time.monotonic())
        await asyncio.sleep(0.005)


async def _steps(log: RunLog, number: int, timeout_s: float) -> None:
    async def are_there() -> bool:
        return await log.next_position(Stream.BATCHES) >= number

    if not await until(are_there, timeout_s=timeout_s):
        raise RuntimeError(f"step {number} does not come within {timeout_s:g} s")


async def _take_over(made: Deployment, log: RunLog, address: str) -> float:
    dead = made.processes.pop(address)
    dead.kill()
    await asyncio.to_thread(dead.wait)
    killed, step = time.monotonic(), await log.next_position(Stream.BATCHES)
    made.start_orchestrator(address=address)
    await _steps(log, step + 1, READY_S)
    return time.monotonic() - killed


@contextlib.contextmanager
def _redis() -> Iterator[EmbeddedRedis]:
    import tempfile

    with tempfile.TemporaryDirectory() as directory, EmbeddedRedis(Path(directory), append_only="none") as server:
        yield server


@contextlib.contextmanager
def _s3_server() -> Iterator[int]:
    """Run moto's S3 server until the block ends; yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "millrace_testing.atomic_moto", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(SUPPORT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        ends = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError("moto did not start")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _proxy(upstream: int, delay_s: float) -> Iterator[int]:
    """Forward connections to a port, each byte `delay_s` late, from a thread until the block ends; yield the port."""
    port, loop = free_port(), asyncio.new_event_loop()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

        async def deliver() -> None:
            while True:
                due, data = await late.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    return writer.close()
                writer.write(data)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                await late.put((loop.time() + delay_s, data))
        await late.put((loop.time() + delay_s, b""))
        with contextlib.suppress(ConnectionError):
            await delivering

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", upstream)
        await asyncio.gather(pipe(reader, their_writer), pipe(their_reader, writer))

    async def listen() -> None:
        await asyncio.start_server(forward, "127.0.0.1", port)

    loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
