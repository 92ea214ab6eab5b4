"""Pools on the real stack: an orchestrator that is killed, and a fork, draw the tasks of an undisturbed run.

The rewards of this environment say whether a task is easy or hard, whatever is sampled, so that runs can be compared.
"""

import json
from collections import Counter
from itertools import takewhile

import pytest

from millrace.internal.v1 import batch_pb2
from millrace.readers.replay import replay
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog import Names
from millrace.telemetry.faults import Point
from millrace_testing.chaos.policies import published, recomputed
from millrace_testing.chaos.run import ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack
from millrace_testing.repository import REPOSITORY

pytestmark = pytest.mark.long

STEPS = 8
ENVIRONMENT = REPOSITORY / "tests" / "fixtures" / "environments" / "sorted_env"
BUFFER = {
    "orchestrator.buffer.easy_threshold": 0.9,
    "orchestrator.buffer.hard_threshold": 0.1,
    "orchestrator.buffer.online_difficulty_filtering": "true",
    "trainer.determinism": "strict",
    "async_level": 0,
}


SELECTED = [
    {
        "id": "sorted-env",
        "name": "twos",
        "rollouts_per_example": 2,
        "select": {"shuffle": True, "seed": 3, "limit": 15},
    },
    {"id": "sorted-env", "name": "fours", "select": {"exclude": {"idx": "0:6"}}},
]
"""Tasks that were chosen, in groups of 2 and of 4."""
REPLAYED = {"orchestrator.buffer.hard_replay": 0.3}
SAMPLED = {"orchestrator.buffer.sampler": "sorted_env:in_turn"}


def resolved(stack: ChaosStack, run: ChaosRun, *, first: int = 0) -> list[batch_pb2.Resolution]:
    """Return what became of every ordinal that the batches from step `first` on resolve."""
    store, names = stack.store(), Names(PREFIX, run.uid)
    headers = [decode_header(store.get(names.batch_header(step))) for step in range(first, STEPS)]
    return [item for header in headers for item in header.resolutions]


def drawn(stack: ChaosStack, run: ChaosRun, *, first: int = 0) -> list[tuple[int, str]]:
    """Return each ordinal with its task, up to the first group that a batch had no room for.

    Groups of two sizes do not always fill a batch exactly: which group is left over depends on which ends last, and
    what is drawn afterwards depends on it.
    """
    items = sorted(resolved(stack, run, first=first), key=lambda item: item.ordinal)
    return [(item.ordinal, item.task_id) for item in takewhile(lambda item: item.reason != "surplus", items)]


def require_equal_draws(one: list[tuple[int, str]], other: list[tuple[int, str]], *, are_whole: bool) -> None:
    """Fail unless two runs drew the same as far as both can be compared; `are_whole` if no group was left over."""
    length = min(len(one), len(other))
    assert one[:length] == other[:length] and length > 4
    assert len(one) == len(other) or not are_whole


@pytest.mark.parametrize(
    ("envs", "draws"), [([{"id": "sorted-env"}], REPLAYED), (SELECTED, SAMPLED)], ids=["all", "selected"]
)
def test_a_killed_orchestrator_and_a_fork_draw_what_an_undisturbed_run_draws(
    make_chaos, envs: list[object], draws: dict[str, object]
) -> None:
    stack: ChaosStack = make_chaos(env={"PYTHONPATH": str(ENVIRONMENT)})
    settings = BUFFER | draws | {"orchestrator.env": json.dumps(envs)}
    undisturbed = stack.submit(max_steps=STEPS, **settings)
    stack.finish(undisturbed)
    expected = drawn(stack, undisturbed)
    counts = undisturbed.of("batch_committed")[-1].batch_committed
    assert counts.num_easy_tasks > 2 and counts.num_hard_tasks > 2, "the pools matter for what is drawn"
    times = Counter(item.task_id for item in resolved(stack, undisturbed) if item.reason == "hard")
    assert draws is SAMPLED or max(times.values()) > 1, "a hard task is played again"

    # One dies with groups in flight, one after a header that Redis has not seen, one before a header.
    armed = [
        stack.arm(Point.ORCHESTRATOR_AFTER_DISPATCH, when={"step": 2}),
        stack.arm(Point.ORCHESTRATOR_AFTER_HEADER, when={"step": 4}),
        stack.arm(Point.ORCHESTRATOR_MID_COMMIT, when={"step": 5}),
    ]
    killed = stack.submit(max_steps=STEPS, **settings)
    stack.finish(killed)  # its audit is clean
    assert len({fault.wait()["pid"] for fault in armed}) == len(armed)
    require_equal_draws(drawn(stack, killed), expected, are_whole=draws is REPLAYED)
    store, names = stack.store(), Names(PREFIX, killed.uid)
    made = published(store, names)
    assert recomputed(store, names, steps=STEPS) == made and len(set(made.values())) == STEPS + 1
    assert replay(store, names, step=STEPS - 1).is_equal

    forked = stack.fork(killed, "forked", "--step=3")
    first = stack.finish(forked).first_step
    assert first == 2, "the fork copies checkpoint 2, and computes step 2 again"
    # Its parent is the killed run, which may have left over another group than the undisturbed one did.
    of_fork, of_parent = (drawn(stack, run, first=first) for run in (forked, killed))
    require_equal_draws(of_fork, of_parent, are_whole=draws is REPLAYED)
