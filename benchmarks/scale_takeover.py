"""Many runs on several orchestrators that share them by lease, and one orchestrator is killed.

For each number of orchestrators: `--runs` runs with a trainer each, and replicas and env-servers up to `--workers`,
which register with one orchestrator each and go to another one when that does not answer. When every run has committed
two steps, `kill -9` ends one orchestrator. Measured is how long the runs that it drove take until another one holds
them, and until that one has committed a step; then all runs go on to their last step, and each is audited.
"""

import argparse
import asyncio
import time
from collections.abc import Iterable

from report import progress, quantile, table
from scale_load import PREFIX, Deployment, Fleet, cpu_s, deployment, fleet, run_config, until

from millrace.readers.audit import audit_run
from millrace.rpc.channel import call, open_channel
from millrace.runlog import RunLog
from millrace.v1 import run_pb2, run_service_pb2, run_service_pb2_grpc
from millrace_testing.orchestrator.runs import resolutions
from millrace_testing.runlog.committed import load_headers

GROUP_SIZE, BATCH_SIZE = 4, 8
READY_S, TAKEOVER_S, END_S = 240.0, 240.0, 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("orchestrators", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--group-seconds", type=float, default=10.0, help="that a group is played")


def report(options: argparse.Namespace) -> str:
    """Measure each number of orchestrators; the table as Markdown."""
    rows = [asyncio.run(_measure(options, number)) for number in options.orchestrators]
    header = [
        "orchestrators", "runs", "workers", "of the killed one", "held again s: first", "median", "last",
        "next step s: first", "median", "last", "other runs taken over", "runs at their end", "rollouts resolved",
        "of them twice or lost", "violations", "CPU s of all",
    ]  # fmt: skip
    return "## One of several orchestrators is killed\n\n" + table(header, rows)


async def _measure(options: argparse.Namespace, number: int) -> list[object]:
    with deployment() as made:
        addresses = [made.start_orchestrator() for _ in range(number)]
        # Else the workers would all go to the first one that listens.
        await until(lambda: all(made.listens(each) for each in addresses), timeout_s=READY_S)
        async with fleet(addresses, made.log, plays=True) as load:
            load.env_server.seconds = options.group_seconds
            await _start(options, made, load, addresses[-1])
            logs = await _created(options, made, addresses[-1])
            await _add_replicas(options, load)
            await _reached(logs, 2, READY_S)
            progress(f"each orchestrator drives {[len(made.driven_by(each)) for each in addresses]} runs")
            return [number, options.runs, options.workers, *await _kill(options, made, logs, addresses)]


async def _start(options: argparse.Namespace, made: Deployment, load: Fleet, address: str) -> None:
    await load.start(replicas=0, env_servers=options.workers // 2, trainers=options.runs)
    if not await until(lambda: load.num_registered >= options.workers // 2 + options.runs, timeout_s=READY_S):
        progress(f"{load.num_registered} workers are registered")


async def _created(options: argparse.Namespace, made: Deployment, address: str) -> list[RunLog]:
    config = run_config(
        batch_size=BATCH_SIZE, group_size=GROUP_SIZE, tokens=100, async_level=1, max_steps=options.steps
    )
    logs = []
    async with open_channel(address) as channel:
        stub = run_service_pb2_grpc.RunServiceStub(channel)
        for index in range(options.runs):
            request = run_service_pb2.CreateRunRequest(
                kind=run_pb2.RUN_KIND_RL, config_json=config, run_id=f"scale-{index:03d}"
            )
            created = (await call(stub.CreateRun, request, timeout_s=60.0)).run
            logs.append(await RunLog.open(**made.log, uid=created.uid))

    async def are_held() -> bool:
        return all([await log.current_epoch("orchestrator") > 0 for log in logs])

    await until(are_held, timeout_s=READY_S)
    progress(f"{len(logs)} runs are driven")
    return logs


async def _add_replicas(options: argparse.Namespace, load: Fleet) -> None:
    """Add replicas a few at a time: a run takes all that are free when it looks, once a second."""
    left = options.workers - options.workers // 2 - options.runs
    while left > 0:
        await load.start(replicas=min(8, left), env_servers=0, trainers=0)
        left -= 8
        await asyncio.sleep(0.5)


async def _reached(logs: Iterable[RunLog], steps: int, timeout_s: float) -> list[RunLog]:
    """Wait until every run has committed so many steps; return those that have not in time."""
    behind = list(logs)

    async def is_there() -> bool:
        behind[:] = [log for log in behind if log.store.head(log.names.batch_header(steps - 1)) is None]
        return not behind

    await until(is_there, timeout_s=timeout_s)
    progress(f"{len(behind)} runs have not committed {steps} steps")
    return behind


async def _kill(
    options: argparse.Namespace, made: Deployment, logs: list[RunLog], addresses: list[str]
) -> list[object]:
    epochs = {log.uid: await log.current_epoch("orchestrator") for log in logs}
    dead = made.processes.pop(addresses[0])
    spent = cpu_s(dead.pid)
    dead.kill()
    await asyncio.to_thread(dead.wait)
    killed, mine = time.monotonic(), made.driven_by(addresses[0])
    steps = {log.uid: _num_steps(log) for log in logs}
    held, moved = dict[str, float](), dict[str, float]()

    async def look() -> bool:
        for log in logs:
            if log.uid not in held and await log.current_epoch("orchestrator") > epochs[log.uid]:
                held[log.uid] = time.monotonic() - killed
            elif log.uid in held and log.uid not in moved and _num_steps(log) > steps[log.uid]:
                moved[log.uid] = time.monotonic() - killed
        return mine <= moved.keys()

    await until(look, timeout_s=TAKEOVER_S)
    progress(f"{len(held)} runs were taken over, {len(mine)} were of the killed orchestrator")
    open_logs = await _closed(logs)
    progress(f"{len(open_logs)} runs have not ended {time.monotonic() - killed:.0f} s after the kill")
    spent += sum(cpu_s(process.pid) for process in made.processes.values())
    times = [_three(found[uid] for uid in mine if uid in found) for found in (held, moved)]
    ended = [log for log in logs if log not in open_logs]
    checked = [await _check(made, log) for log in ended]
    return [
        len(mine), *times[0], *times[1], len(held.keys() - mine), len(ended), sum(each[0] for each in checked),
        sum(each[1] for each in checked), sum(each[2] for each in checked), f"{spent:.0f}",
    ]  # fmt: skip


def _num_steps(log: RunLog) -> int:
    return sum(
        info.key.endswith(".pb") and "/" not in info.key.removeprefix(log.names.batches)
        for info in log.store.list(log.names.batches)
    )


async def _closed(logs: list[RunLog]) -> list[RunLog]:
    """Wait until every run is sealed; return those that are not in time."""
    behind = list(logs)

    async def are_sealed() -> bool:
        behind[:] = [log for log in behind if log.store.head(log.names.seal(0)) is None]
        return not behind

    await until(are_sealed, timeout_s=END_S)
    return behind


async def _check(made: Deployment, log: RunLog) -> tuple[int, int, int]:
    """Return how many ordinals a run resolved, how many twice or never, and the violations that its audit found.

    The load's trainer writes no weights and no reports: what is said of these does not count.
    """
    headers, _ = await load_headers(log)
    number = sum(len(header.resolutions) for header in headers)
    try:
        num_wrong = number - len(resolutions(headers))
    except AssertionError as error:
        progress(f"run {log.uid}: {error}")
        num_wrong = 1
    found = await audit_run(made.log["redis"], log.store, prefix=PREFIX, uid=log.uid)
    theirs = ("POLICY_", "STEP_NOT_REPORTED")
    ours = [each for each in found.violations if "/policies/" not in each.message and not each.check.startswith(theirs)]
    for each in ours[:3]:
        progress(f"run {log.uid}: {each.check}: {each.message}")
    return number, num_wrong, len(ours)


def _three(seconds: Iterable[float]) -> list[str]:
    found = sorted(seconds)
    return [f"{each:.1f}" for each in (found[0], quantile(found, 0.5), found[-1])] if found else ["-"] * 3
