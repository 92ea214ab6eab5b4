"""Runs that have ended: what they cost an orchestrator that begins, one that idles, and Redis.

For each number of finished runs: CPU seconds until a new orchestrator has answered its first list of 50 runs, its share
of a core while it idles, what Redis keeps of a run, and the CPU seconds until the same answer after a FLUSHALL. With
`--open` so many of the runs have not ended.
"""

import argparse
import asyncio
import hashlib
import json
import time

from report import progress, table
from scale_load import PREFIX, Deployment, cpu_s, deployment, run_config

from millrace.errors import MillraceError
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.drive.batch_writer import encode_state
from millrace.orchestrator.play.failures import Tally
from millrace.rpc.channel import call, open_channel
from millrace.runlog import Frontier, RunLog, chain_hash, commit_batch, new_uid
from millrace.runlog.event_archive import EventArchive
from millrace.runlog.index import create_run, note_ended, read_open
from millrace.runlog.rebuild import ENDED_S
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.run_record import RunRecord, load_origin
from millrace.runlog.seal import write_seal
from millrace.v1 import event_pb2, run_pb2, run_service_pb2, run_service_pb2_grpc

ANSWER_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("runs", type=int, nargs="*", default=[100, 300, 1000])
    parser.add_argument("--open", type=int, default=0, help="how many of the runs have not ended")
    parser.add_argument(
        "--full", type=int, default=0, help="so many of the newest runs have a log, the others only a record (0: all)"
    )
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before the idle orchestrator is measured")
    parser.add_argument("--seconds", type=float, default=15.0, help="of the idle measurement")


def report(options: argparse.Namespace) -> str:
    """Measure each number of runs; the table as Markdown."""
    rows = [asyncio.run(_measure(options, runs)) for runs in options.runs]
    header = [
        "runs",
        "open",
        "start CPU s",
        "idle CPU %",
        "MB",
        "Redis KB/run",
        "of them expire",
        "after FLUSHALL CPU s",
        "s",
    ]
    return "## Runs that have ended\n\n" + table(header, rows)


async def _measure(options: argparse.Namespace, runs: int) -> list[object]:
    with deployment() as made:
        place = made.log
        redis = place["redis"]
        await read_open(redis, place["store"], PREFIX, is_compared=True)  # as an orchestrator does before any run
        gate = asyncio.Semaphore(8)

        async def create(number: int) -> None:
            async with gate:
                is_bare = 0 < options.full <= runs - 1 - number and number >= options.open
                await _create(place, number, is_ended=number >= options.open, is_bare=is_bare)

        await asyncio.gather(*map(create, range(runs)))
        progress(f"{runs} runs created")
        _, start = await _start(made)
        pid = next(iter(made.processes.values())).pid
        await asyncio.sleep(options.settle)
        before, began = cpu_s(pid), time.monotonic()
        await asyncio.sleep(options.seconds)
        idle = 100 * (cpu_s(pid) - before) / (time.monotonic() - began)
        used = (await redis.info("memory"))["used_memory"] / 1024 / runs
        keys = [key async for key in redis.scan_iter(match=f"{PREFIX}:{{*", count=1000)]
        expire = sum([await redis.ttl(key) > 0 for key in keys])
        memory = _resident_mb(pid)
        made.stop()
        await redis.flushall()
        seconds, flushed = await _start(made)
        await redis.aclose()
    shown = [f"{start:.2f}", f"{idle:.2f}", f"{memory:.0f}", f"{used:.1f}", f"{expire}/{len(keys)}"]
    return [runs, options.open, *shown, f"{flushed:.2f}", f"{seconds:.1f}"]


async def _start(made: Deployment) -> tuple[float, float]:
    """Start an orchestrator alone; return wall and CPU seconds until it has listed its newest 50 runs."""
    made.processes.clear()
    address, began = made.start_orchestrator(), time.monotonic()
    pid = made.processes[address].pid
    async with open_channel(address) as channel:
        stub = run_service_pb2_grpc.RunServiceStub(channel)
        while True:
            try:
                await call(stub.ListRuns, run_service_pb2.ListRunsRequest(page_size=50), timeout_s=ANSWER_S)
                break
            except MillraceError:
                if time.monotonic() - began > ANSWER_S:
                    raise
                await asyncio.sleep(0.1)
    return time.monotonic() - began, cpu_s(pid)


def _resident_mb(pid: int) -> float:
    import psutil

    return psutil.Process(pid).memory_info().rss / 2**20


async def _create(place: dict, number: int, *, is_ended: bool, is_bare: bool) -> None:
    """Write a run of one step: its record, its events and, if it has ended, closing header, archive and seal.

    Of a bare run write its record, and what lists it among all.
    """
    uid, config = new_uid(), run_config(batch_size=8, group_size=4, tokens=64, async_level=1)
    redis, store = place["redis"], place["store"]
    record = RunRecord(
        uid=uid,
        name=f"run-{number:06d}",
        kind="RL",
        config=json.loads(config),
        run_hash=hashlib.sha256(uid.encode()).hexdigest(),
        request_id="",
        create_time="2026-01-01T00:00:00Z",
        code_version="x",
        labels={},
    )
    await create_run(redis, store, PREFIX, uid=uid, name=record.name, run_json=record.encode())
    if is_bare:
        await note_ended(redis, store, PREFIX, uid=uid, number=0)
    if is_bare or not is_ended:
        return
    log = await RunLog.open(redis, store, prefix=PREFIX, uid=uid)
    states = (run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_SUCCEEDED)
    bodies = [{"state_changed": event_pb2.StateChanged(new_state=state, reason="x")} for state in states]
    bodies.insert(1, {"step_completed": event_pb2.StepCompleted(step=0, num_rollouts=8, num_tokens=100)})
    for sequence, body in enumerate(bodies, 1):
        event = event_pb2.Event(writer="o", writer_sequence=sequence, **body)
        event.time.GetCurrentTime()
        (await log.append_event(event.SerializeToString(), writer="o", sequence=sequence)).require("event")
    chain = load_origin(store, log.names).chain_hash
    header = batch_pb2.BatchHeader(
        run_uid=uid,
        kind=batch_pb2.BATCH_KIND_CLOSE,
        step=0,
        outcome=batch_pb2.RUN_OUTCOME_SUCCEEDED,
        previous_chain_hash=chain,
        run_hash=record.run_hash,
        orchestrator_state=encode_state(next_ordinal=0, num_duplicates=0, read_until="0", failures=Tally()),
    )
    Frontier().fill(header)
    known = KnownObjects()
    data = await commit_batch(log, await log.acquire_epoch("orchestrator", "o"), header, [], b"", known=known)
    await EventArchive(log).archive()
    key = log.names.seal(0)
    await asyncio.to_thread(
        write_seal, store, log.names, key, known, chain=chain_hash(chain, data), state="SUCCEEDED", by="o"
    )
    await log.expire(ENDED_S)
    await note_ended(redis, store, PREFIX, uid=uid, number=0)
