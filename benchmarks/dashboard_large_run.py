"""The dashboard over a run of 2,000 steps and a million rollouts: how long an index takes, and how long pages take,
of the dashboard and of the API's ListMetrics, ListRollouts and GetLineage.

Headers and events are those of such a run; the archives behind them are four, each named by a quarter of the headers,
because writing a million rollouts takes longer than reading them. They are read and decoded for every header; with
`--filled` only the first four are, and the rows of the others are copies of theirs: for a quick look at the pages.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from millrace.errors import UnavailableError
from millrace.internal.v1 import batch_pb2
from millrace.readers.beside import LogLists
from millrace.readers.dashboard.index import TEXT_BYTES, Columns
from millrace.readers.dashboard.query import SampleIndex
from millrace.readers.dashboard.reading import ReaderClient
from millrace.rollouts.batch_wire import decode_header
from millrace.rpc.channel import call, open_channel
from millrace.rpc.interceptors import CallInterceptor
from millrace.runlog.records.run_record import RunRecord
from millrace.storage.local import LocalStore
from millrace.v1 import run_service_pb2 as rs
from millrace.v1.run_service_pb2_grpc import RunServiceServicer, RunServiceStub, add_RunServiceServicer_to_server
from millrace_testing.dashboard import NAMES, RUN, RunWriter, Served, serving

ARCHIVES = 4
REPEATS = 15
STEP = 20
"""Of the sample that is looked at."""
PAGES = {
    "runs": "/api/runs",
    "run": f"/api/runs/{RUN}",
    "curves": f"/api/runs/{RUN}/metrics?names=reward/mean,loss/mean&spread=1&points=400",
    "events": f"/api/runs/{RUN}/events?size=100",
    "samples, newest": f"/api/runs/{RUN}/samples",
    "samples, highest reward": f"/api/runs/{RUN}/samples?sort=-reward",
    "samples, page 10,000": f"/api/runs/{RUN}/samples?sort=reward&offset=500000",
    "samples, filtered": f"/api/runs/{RUN}/samples?outcome=trained&min_reward=5&max_sampled=60&sort=-advantage",
    "samples, of one version": f"/api/runs/{RUN}/samples?version=1",
    "sample": f"/api/runs/{RUN}/samples/{STEP}-7",
    "tokens": f"/api/runs/{RUN}/samples/{STEP}-7/tokens",
    "lineage of a sample": f"/api/runs/{RUN}/lineage?sample={STEP}-7",
    "lineage of a version": f"/api/runs/{RUN}/lineage?version=1",
    "timeline, 20 steps": f"/api/runs/{RUN}/timeline?steps=20",
    "timeline, 500 steps": f"/api/runs/{RUN}/timeline?steps=500",
}

CURVES = ("reward/mean", "loss/mean")
CALLS = {
    "ListMetrics": ("ListMetrics", rs.ListMetricsRequest(parent=RUN, page_size=100)),
    "ListMetrics, 1,000 steps": ("ListMetrics", rs.ListMetricsRequest(parent=RUN, page_size=1000, names=CURVES)),
    "ListRollouts": ("ListRollouts", rs.ListRolloutsRequest(parent=RUN, page_size=100)),
    "ListRollouts, sorted": ("ListRollouts", rs.ListRolloutsRequest(parent=RUN, page_size=100, order_by="reward desc")),
    "ListRollouts, filtered": (
        "ListRollouts",
        rs.ListRolloutsRequest(
            parent=RUN, page_size=100, filter={"outcome": "trained", "min_reward": "5", "max_sampled": "60"},
            order_by="advantage desc",
        ),
    ),
    "GetLineage of a rollout": ("GetLineage", rs.GetLineageRequest(name=RUN, rollout=f"{STEP}-7")),
    "GetLineage of a version": ("GetLineage", rs.GetLineageRequest(name=RUN, version=1)),
}  # fmt: skip


class Calls(RunServiceServicer):
    """The three calls as the orchestrator answers them, of one run."""

    def __init__(self, reader: ReaderClient) -> None:
        self._lists = LogLists(reader)
        self._record = RunRecord(uid=NAMES.uid, name=RUN)

    async def ListMetrics(
        self, request: rs.ListMetricsRequest, context: grpc.aio.ServicerContext
    ) -> rs.ListMetricsResponse:
        return await self._lists.metrics(request, self._record)

    async def ListRollouts(
        self, request: rs.ListRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> rs.ListRolloutsResponse:
        return await self._lists.rollouts(request, self._record)

    async def GetLineage(
        self, request: rs.GetLineageRequest, context: grpc.aio.ServicerContext
    ) -> rs.GetLineageResponse:
        return await self._lists.lineage(request, self._record)


async def measure_calls(store: LocalStore, directory: Path) -> None:
    """Print what the calls take over the index that lies there, through gRPC, and the page behind the first."""
    reader = ReaderClient(store_url=store.uri("").rstrip("/"), prefix="millrace", directory=directory)
    server = grpc.aio.server(interceptors=[CallInterceptor()])
    add_RunServiceServicer_to_server(Calls(reader), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = RunServiceStub(channel)
            await _first_answer(stub)
            for name, (method, request) in CALLS.items():
                found = await _timed(name, getattr(stub, method), request)
                if token := getattr(found, "next_page_token", ""):
                    following = type(request)()
                    following.CopyFrom(request)
                    following.page_token = token
                    await _timed(f"{name}, page 2", getattr(stub, method), following)
    finally:
        await server.stop(None)
        await reader.close()


async def _first_answer(stub: RunServiceStub) -> None:
    """Wait until the reader has read the log again: until then it says that it cannot answer yet."""
    began = time.monotonic()
    while True:
        try:
            await call(stub.ListRollouts, CALLS["ListRollouts"][1], timeout_s=120.0)
            await call(stub.ListMetrics, CALLS["ListMetrics"][1], timeout_s=120.0)
            break
        except UnavailableError:
            await asyncio.sleep(0.2)
    print(f"first answers of the API after a start: {time.monotonic() - began:.1f} s")


async def _timed(name: str, method: Any, request: Any) -> Any:
    times, found = [], None
    for _ in range(REPEATS):
        at = time.monotonic()
        found = await call(method, request, timeout_s=60.0)
        times.append(1000 * (time.monotonic() - at))
    assert found is not None
    report(name, times, found.ByteSize())
    return found


def report(name: str, times: list[float], size: int) -> None:
    """A line of the result; times in milliseconds, size in bytes."""
    print(
        f"{name:32} median {statistics.median(times):6.0f} ms   largest {max(times):6.0f} ms   {size:9,} bytes",
        flush=True,
    )


def write(store: LocalStore, steps: int, rollouts: int, *, filled: Path | None = None) -> None:
    """The run."""
    writer = RunWriter(store=store, members=rollouts + 1)
    for step in range(ARCHIVES):
        writer.step(step)
    headers = [decode_header(store.get(NAMES.batch_header(step))) for step in range(ARCHIVES)]
    if filled is not None:
        fill(store, filled, steps)
    for step in range(ARCHIVES, steps):
        header = batch_pb2.BatchHeader()
        header.CopyFrom(headers[step % ARCHIVES])
        header.step = step
        store.create(NAMES.batch_header(step), header.SerializeToString())
        writer.events(step)


def fill(store: LocalStore, directory: Path, steps: int) -> None:
    """Rows for every header, from those of the first archives."""
    columns = Columns(directory / "00" / NAMES.uid)
    index = SampleIndex(store, NAMES, columns, secrets=())
    while columns.num_rows == 0 or index.looking.is_busy:
        index.looking.refresh(1.0)
    rows, texts = columns.rows().copy(), (columns.directory / "texts.bin").read_bytes()
    for step in range(ARCHIVES, steps):
        segment = columns.segments[step % ARCHIVES]
        end = segment.first + segment.count
        part = rows[segment.first : end].copy()
        part["step"] = step
        text = texts[segment.first * TEXT_BYTES : end * TEXT_BYTES]
        columns.append(step=step, revision=0, key=NAMES.batch_header(step), rows=part, texts=text)
    index.close()


async def measure(served: Served, steps: int) -> None:
    """Print what it took."""
    began = time.monotonic()
    while True:
        _, page = await asyncio.to_thread(served.json, f"/api/runs/{RUN}/samples")
        if page["index"]["batches"] >= steps and not page["index"]["is_growing"]:
            break
        await asyncio.sleep(1.0)
    took = time.monotonic() - began
    rows = page["index"]["rollouts"]
    print(f"index of {rows:,} rollouts: {took:.0f} s in the background, {1e6 * took / rows:.0f} µs each")
    for name, path in PAGES.items():
        times, body = [], b""
        for _ in range(REPEATS):
            at = time.monotonic()
            status, _, body = await asyncio.to_thread(served.ask, path)
            times.append(1000 * (time.monotonic() - at))
            assert status == 200, (name, body[:500])
        report(name, times, len(body))
    for child in psutil.Process().children():
        print(f"memory of the reader: {child.memory_info().rss / 2**20:.0f} MiB")


async def main(steps: int, rollouts: int, *, is_filled: bool) -> None:
    """Write, serve, measure."""
    with tempfile.TemporaryDirectory() as place:
        store = LocalStore(Path(place) / "store")
        began = time.monotonic()
        write(store, steps, rollouts, filled=Path(place) / "index" if is_filled else None)
        print(f"written in {time.monotonic() - began:.0f} s")
        async with serving(store, Path(place) / "index") as served:
            await measure(served, steps)
        await measure_calls(store, Path(place) / "index")
        used = sum(path.stat().st_size for path in (Path(place) / "index").rglob("*") if path.is_file())
        print(f"index on disk: {used / 2**20:.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rollouts", type=int, default=500, help="Of a step.")
    parser.add_argument("--filled", action="store_true", help="Copy rows instead of decoding archives.")
    parser.add_argument("--quick", action="store_true", help="40 steps of 100.")
    given = parser.parse_args()
    steps, rollouts = (40, 100) if given.quick else (given.steps, given.rollouts)
    asyncio.run(main(steps, rollouts, is_filled=given.filled))
