"""Kills at random moments, again and again, in all services and Redis: `make soak` for twenty minutes of it."""

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from millrace_testing.chaos.rows import RETENTION
from millrace_testing.chaos.run import ChaosRun, longest_gap
from millrace_testing.chaos.stack import SERVICES, ChaosStack

VICTIMS = (*SERVICES, "redis")
MINUTES = float(os.environ.get("MILLRACE_SOAK_MINUTES", "20"))
SEED = int(os.environ.get("MILLRACE_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
PAUSE_S = (5.0, 15.0)
STEPS = 120
END_S = 1800.0  # for the last run after the last kill, on whatever machine: one that stands still fails sooner

Kill = tuple[str, float]
"""Who, and when as `time.time()`."""


@pytest.mark.long
def test_every_service_is_killed_within_seconds_of_the_others(chaos: ChaosStack) -> None:
    dice = random.Random(SEED)
    print(f"seed {SEED}: MILLRACE_SOAK_SEED={SEED} repeats the choices")
    run = chaos.submit(max_steps=30)
    run.wait_step(2)
    victims = dice.sample(VICTIMS, len(VICTIMS))
    before, at = chaos.pids(), time.time()
    for name in victims:
        chaos.kill(name)
        time.sleep(dice.uniform(0.0, 2.0))
    chaos.finish(run)
    assert all(chaos.pid(name) != before[name] for name in victims)
    print(f"{', '.join(victims)}: {run.standstill_s(at):.1f} s without progress at most")


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + END_S)
def test_soak(make_chaos) -> None:
    dice = random.Random(SEED)
    print(f"\nsoak of {MINUTES:g} minutes, seed {SEED}: MILLRACE_SOAK_SEED={SEED} repeats the choices", flush=True)
    stack: ChaosStack = make_chaos()
    kills: list[Kill] = []
    bag: list[str] = []
    runs = [stack.submit(max_steps=STEPS, **RETENTION)]
    ends = time.monotonic() + MINUTES * 60
    while time.monotonic() < ends:
        pause_ends = time.monotonic() + dice.uniform(*PAUSE_S)
        while time.monotonic() < pause_ends:
            if runs[-1].is_over:
                _close(stack, runs[-1])
                kept = {} if len(runs) % 2 else RETENTION  # every other run without, so that its audit sees everything
                runs.append(stack.submit_patiently(max_steps=STEPS, **kept))
            time.sleep(0.1)
        bag = bag or dice.sample(VICTIMS, len(VICTIMS))  # everybody once per round, in an order of its own
        name = bag.pop()
        kills.append((name, stack.kill_running(name)))
    stack.finish(runs[-1])
    assert {name for name, _ in kills[: len(VICTIMS)]} == set(VICTIMS), "everybody was killed"
    print(_figures(stack, runs, kills), flush=True)


def _close(stack: ChaosStack, run: ChaosRun) -> None:
    """A run that ended by itself is clean, whichever process may be dead at the moment."""
    stack.wait_ready()
    stack.finish(run)
    print(f"{run.name}: {len(set(run.steps()))} steps, audit clean", flush=True)


def _figures(stack: ChaosStack, runs: Sequence[ChaosRun], kills: Sequence[Kill]) -> str:
    """Return the report: who was killed, how soon there was progress again, and what the audits say in sum."""
    reports = [stack.audit(run) for run in runs]
    times = sorted(at for run in runs for at in run.progress_times())
    next_kills = [*(at for _, at in kills[1:]), times[-1]]
    recoveries = sorted(min(later for later in times if later > at) - at for _, at in kills)
    standstills = sorted(longest_gap(times, since=at, until=to) for (_, at), to in zip(kills, next_kills, strict=True))
    dropped: Counter[str] = Counter()
    for report in reports:
        dropped.update(dict(report.dropped))
    by_service = Counter(name for name, _ in kills)
    rows = {
        "kills": f"{len(kills)}: {', '.join(f'{name} {by_service[name]}' for name in VICTIMS)}",
        "kill to the next progress event": _spread(recoveries),
        "longest standstill between a kill and the next": _spread(standstills),
        "runs": f"{len(runs)}, all SUCCEEDED, audits clean",
        "steps": str(sum(report.num_steps for report in reports)),
        "ordinals trained": str(sum(report.num_trained for report in reports)),
        "ordinals dropped": ", ".join(f"{reason} {count}" for reason, count in dropped.items()) or "none",
        "duplicates discarded": str(sum(report.num_duplicates for report in reports)),
        "rebuilds of Redis": str(sum(report.num_generations - 1 for report in reports)),
        "takeovers": ", ".join(
            f"{role} {sum(report.epochs[role] - 1 for report in reports)}" for role in ("orchestrator", "trainer")
        ),
    }
    return "\n".join(f"{title}: {value}" for title, value in rows.items())


def _spread(seconds: Sequence[float]) -> str:
    """Return median, 95th percentile and maximum of sorted seconds."""
    rank95 = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
    return f"median {statistics.median(seconds):.1f} s, p95 {rank95:.1f} s, max {seconds[-1]:.1f} s"
