"""Workers that one orchestrator holds: CPU per heartbeat, dispatch of a run's groups, an order to update to replicas.

For each number of workers: an orchestrator, half of the workers replicas and half env-servers, one trainer. First they
only send heartbeats (idle); then a run opens as many groups as it may, which never end (hold), and a version is
published, which every replica shall be told (update). With `--play` the groups end at once instead.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass

from report import progress, quantile, table
from scale_load import Deployment, Fleet, cpu_s, delay_s, deployment, fleet, publish, run_config, until

from millrace.rpc.channel import call, open_channel
from millrace.runlog import RunLog
from millrace.v1 import run_pb2, run_service_pb2, run_service_pb2_grpc

GROUP_SIZE = 16
READY_S = 90.0


@dataclass
class Row:
    """What was seen at one number of workers."""

    workers: int
    idle: list[object]
    dispatch: list[object]
    steady: list[object]
    update: list[object]
    whole: list[object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("workers", type=int, nargs="*", default=[100, 200, 400])
    parser.add_argument("--groups", type=int, default=192, help="groups that the run may have open")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each steady measurement")
    parser.add_argument("--update-s", type=float, default=0.2, help="that a replica takes for a version")
    parser.add_argument("--play", action="store_true", help="groups end at once")
    parser.add_argument("--profile", default="", help="write a cProfile of the orchestrator to this file")


def report(options: argparse.Namespace) -> str:
    """Measure each number of workers; the tables as Markdown."""
    rows = [asyncio.run(_measure(options, workers)) for workers in options.workers]
    beats = [
        "heartbeats/s",
        "CPU %",
        "ms of CPU each",
        "p50 ms",
        "p99 ms",
        "again",
        "lost",
        "load's CPU %",
        "waited for a core %",
    ]
    return "\n\n".join(
        [
            f"## Workers of one orchestrator\n\n{options.groups} open groups of {GROUP_SIZE}.",
            "### Idle\n\n" + table(["workers", *beats], [[row.workers, *row.idle] for row in rows]),
            "### Dispatch\n\n"
            + table(["workers", "groups", "s", "ms of CPU a group"], [[row.workers, *row.dispatch] for row in rows]),
            "### With a run\n\n"
            + table(["workers", *beats, "plays", "sent twice"], [[row.workers, *row.steady] for row in rows]),
            "### Order to update\n\n"
            + table(
                ["workers", "replicas", "told", "last after s", "served after s", "CPU s"],
                [[row.workers, *row.update] for row in rows],
            ),
            "### From start to end\n\n"
            + table(
                ["workers", "lost", "asked to register again", "calls that failed", "first ends of calls"],
                [[row.workers, *row.whole] for row in rows],
            ),
        ]
    )


async def _measure(options: argparse.Namespace, workers: int) -> Row:
    with deployment() as made:
        address = made.start_orchestrator(profile=options.profile)
        pid = made.processes[address].pid
        async with fleet([address], made.log, plays=options.play) as load:
            replicas = workers // 2
            await load.start(replicas=replicas, env_servers=workers - replicas - 1, update_s=options.update_s)
            if not await until(lambda: load.num_registered >= workers, timeout_s=READY_S):
                progress(f"{workers} workers: {load.num_registered} registered")
            await asyncio.sleep(2.0)
            load.all_failures.clear()  # of the time before the orchestrator listened
            progress(f"{workers} workers: idle")
            idle = await _beats(options, made, load, pid)
            progress(f"{workers} workers: dispatch")
            uid, dispatch = await _dispatch(options, load, address, pid)
            await asyncio.sleep(2.0)
            progress(f"{workers} workers: with a run")
            steady = await _beats(options, made, load, pid)
            twice = sum(count - 1 for count in load.env_server.asked.values())
            steady += [load.env_server.calls["PlayGroup"], twice]
            progress(f"{workers} workers: update")
            update: list[object] = ["-"] * 5 if options.play else await _update(made, load, pid, uid)
            again, failed = load.num_registered_again, load.all_failures
            whole: list[object] = [made.said("worker lost"), again, failed.total(), "; ".join(failed) or "-"]
            return Row(workers, idle, dispatch, steady, update, whole)


async def _beats(options: argparse.Namespace, made: Deployment, load: Fleet, pid: int) -> list[object]:
    load.reset()
    lost, cpu, own, began = made.said("worker lost"), cpu_s(pid), cpu_s(), time.monotonic()
    delayed = delay_s(pid)
    await asyncio.sleep(options.seconds)
    seconds, cpu = time.monotonic() - began, cpu_s(pid) - cpu
    count = len(load.latencies_s)
    times = [1e3 * quantile(load.latencies_s, share) if count else float("nan") for share in (0.5, 0.99)]
    return [
        f"{count / seconds:.0f}",
        f"{100 * cpu / seconds:.1f}",
        f"{1e3 * cpu / max(1, count):.2f}",
        *(f"{each:.0f}" for each in times),
        load.num_registered,
        made.said("worker lost") - lost,
        f"{100 * (cpu_s() - own) / seconds:.0f}",
        f"{100 * (delay_s(pid) - delayed) / seconds:.0f}",
    ]


async def _dispatch(options: argparse.Namespace, load: Fleet, address: str, pid: int) -> tuple[str, list[object]]:
    async_level = 2
    batch_size = options.groups // (async_level + 1) * GROUP_SIZE
    config = run_config(batch_size=batch_size, group_size=GROUP_SIZE, tokens=100, async_level=async_level)
    async with open_channel(address) as channel:
        request = run_service_pb2.CreateRunRequest(kind=run_pb2.RUN_KIND_RL, config_json=config, run_id="scale")
        stub = run_service_pb2_grpc.RunServiceStub(channel)
        created = (await call(stub.CreateRun, request, timeout_s=60.0)).run
    calls = load.env_server.calls
    await until(lambda: calls["PlayGroup"] > 0, timeout_s=READY_S)
    first, cpu, began = calls["PlayGroup"], cpu_s(pid), time.monotonic()
    await until(lambda: calls["PlayGroup"] >= options.groups, timeout_s=READY_S)
    seconds, count = time.monotonic() - began, calls["PlayGroup"]
    each = 1e3 * (cpu_s(pid) - cpu) / max(1, count - first)
    return created.uid, [count, f"{seconds:.1f}", f"{each:.2f}"]


async def _update(made: Deployment, load: Fleet, pid: int, uid: str) -> list[object]:
    log = await RunLog.open(**made.log, uid=uid)
    version = max(replica.status.version for replica in load.replicas) + 1
    cpu, began = cpu_s(pid), time.monotonic()
    await publish(log, version)
    await until(lambda: all(replica.status.version >= version for replica in load.replicas), timeout_s=60.0)
    served = time.monotonic() - began
    told = [replica.told[version] - began for replica in load.replicas if version in replica.told]
    await asyncio.sleep(1.0)
    return [len(load.replicas), len(told), f"{max(told, default=-1):.2f}", f"{served:.2f}", f"{cpu_s(pid) - cpu:.2f}"]
