"""Everything at once, at random, for half an hour: `make torture`.

Kills, freezes, clocks that jump, a store without room and flipped bits, one every few seconds and many at a time. Every
run ends as SUCCEEDED by itself and its audit is clean. The choices are the seed's; when they strike is the machine's.

MILLRACE_TORTURE_MINUTES (30), MILLRACE_TORTURE_SEED, MILLRACE_TORTURE_KINDS (a comma between them; default all),
MILLRACE_TORTURE_REPORT (a file for the figures).
"""

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from millrace.local import stack as preloads
from millrace.storage.s3 import S3Store
from millrace_testing.chaos.clocks import Clocks, library
from millrace_testing.chaos.fault_proxy import FaultProxy
from millrace_testing.chaos.injuries import Injury, Torturer
from millrace_testing.chaos.run import PROGRESS, ChaosRun, longest_gap
from millrace_testing.chaos.stack import SERVICES, ChaosStack

MINUTES = float(os.environ.get("MILLRACE_TORTURE_MINUTES", "30"))
SEED = int(os.environ.get("MILLRACE_TORTURE_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
KINDS = [kind.strip() for kind in os.environ.get("MILLRACE_TORTURE_KINDS", "").split(",") if kind.strip()]
REPORT = os.environ.get("MILLRACE_TORTURE_REPORT", "")
PAUSE_S = (2.0, 10.0)
TELL_S = 30.0
STEPS = 60
END_S = 1800.0  # for the last run after the last injury, on whatever machine: one that stands still fails sooner
STALLS_S = 300.0
BUCKET = "millrace-torture"


@pytest.fixture
def torturer(warm, make_chaos, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Torturer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    S3Store(bucket=BUCKET, endpoint=s3_endpoint, region="us-east-1").ensure_bucket()
    clocks = Clocks(warm.path / "outputs" / f"torture-clocks-{SEED}") if library() else None
    environ = {**(clocks.environ if clocks else {}), preloads.VARIABLE: "1"}
    with FaultProxy(s3_endpoint) as proxy:
        environ["MILLRACE_STORE_URL"] = f"s3://{BUCKET}/store?endpoint={proxy.endpoint}&region=us-east-1"
        stack = make_chaos(env=environ)
        yield Torturer(stack=stack, dice=random.Random(SEED), proxy=proxy, clocks=clocks)
        proxy.clear()
        stack.stop()


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + END_S)
def test_torture(torturer: Torturer) -> None:
    print(
        f"\ntorture of {MINUTES:g} minutes, seed {SEED}: MILLRACE_TORTURE_SEED={SEED} repeats the choices", flush=True
    )
    kinds = torturer.kinds()
    names = [name for name in kinds if not KINDS or name in KINDS]
    assert names and set(KINDS) <= set(kinds), f"kinds are {sorted(kinds)}, not {KINDS}"
    if torturer.clocks is None:
        print("no libfaketime (apt-get install faketime): no clock jumps", flush=True)
    stack, dice = torturer.stack, torturer.dice
    done: list[Injury] = []
    open_ones: list[Injury] = []
    runs, reports = [stack.submit(max_steps=STEPS)], []
    began = told = time.monotonic()
    try:
        while time.monotonic() < began + MINUTES * 60:
            pause_ends = time.monotonic() + dice.uniform(*PAUSE_S)
            while time.monotonic() < pause_ends:
                _heal(open_ones, time.time())
                if runs[-1].is_over:
                    reports.append(_close(stack, runs[-1]))
                    runs.append(stack.submit_patiently(max_steps=STEPS))
                time.sleep(0.1)
            if injury := kinds[dice.choice(names)]():
                done.append(injury)
                open_ones += [injury] if injury.undo else []
                print(f"  {injury.kind}: {injury.target} {injury.lasts_s:.1f} s", flush=True)
            if time.monotonic() > told + TELL_S:
                told = time.monotonic()
                steps = sum(len(set(run.steps())) for run in runs)
                print(
                    f"{(told - began) / 60:.1f} min: {len(done)} injuries, {len(runs)} runs, {steps} steps", flush=True
                )
    finally:
        _heal(open_ones, float("inf"))
    reports.append(stack.finish(runs[-1], stalls_s=STALLS_S))
    for (
        run
    ) in runs:  # bits were flipped in the copies of ended runs, too, which nobody reads any more: the truth is whole
        stack.audit(run, store_only=True)
    figures = _figures(stack, runs, reports, done)
    print(figures, flush=True)
    if REPORT:
        Path(REPORT).write_text(_report(figures, (time.monotonic() - began) / 60))


def _heal(open_ones: list[Injury], now: float) -> None:
    """End what has lasted long enough."""
    for injury in list(open_ones):
        if now >= injury.at + injury.lasts_s:
            open_ones.remove(injury)
            assert injury.undo is not None
            injury.undo()


def _close(stack: ChaosStack, run: ChaosRun) -> Any:
    """Return the audit's report of a run that ended by itself, which is clean."""
    stack.wait_ready()
    report = stack.finish(run)
    print(f"{run.name}: {len(set(run.steps()))} steps, audit clean", flush=True)
    return report


def _figures(stack: ChaosStack, runs: Sequence[ChaosRun], reports: Sequence[Any], done: Sequence[Injury]) -> str:
    """Return one figure a line; times are those at which events came here, because clocks jumped."""
    pairs = [pair for run in runs for pair in zip(run.events, run.heard, strict=False)]
    times = sorted(at for event, at in pairs if event.WhichOneof("body") in PROGRESS)
    next_ones = [*(injury.at for injury in done[1:]), times[-1]]
    gaps = sorted(longest_gap(times, since=i.at, until=to) for i, to in zip(done, next_ones, strict=True))
    dropped: Counter[str] = Counter()
    for report in reports:
        dropped.update(dict(report.dropped))
    by_kind = Counter(injury.kind for injury in done)
    rows = {
        "injuries": f"{len(done)}: {', '.join(f'{kind} {count}' for kind, count in sorted(by_kind.items()))}",
        "longest standstill between an injury and the next": f"median {statistics.median(gaps):.1f} s, "
        f"p95 {gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))]:.1f} s, max {gaps[-1]:.1f} s",
        "runs": f"{len(runs)}, all SUCCEEDED, audits clean",
        "steps": str(sum(report.num_steps for report in reports)),
        "ordinals trained": str(sum(report.num_trained for report in reports)),
        "ordinals dropped": ", ".join(f"{reason} {count}" for reason, count in dropped.items()) or "none",
        "duplicates discarded": str(sum(report.num_duplicates for report in reports)),
        "rebuilds of Redis": str(sum(report.num_generations - 1 for report in reports)),
        "processes started again": ", ".join(f"{name} {stack.restarts(name)}" for name in (*SERVICES, "redis")),
    }
    return "\n".join(f"* {title}: {value}" for title, value in rows.items())


def _report(figures: str, minutes: float) -> str:
    """`benchmarks/results/torture.md`."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        "# Torture\n\nEverything at random at once, by `make torture`: kills, freezes, clock jumps of up to five "
        "hours, a store without room, flipped bits.\n\n"
        f"{minutes:.0f} minutes on {datetime.now(UTC):%Y-%m-%d}, seed {SEED}, {os.cpu_count()} cores, load average "
        f"(1, 5, 15 min) {load}.\n\n{figures}\n"
    )
