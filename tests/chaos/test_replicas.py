"""Two inference replicas: one joins, falls behind, hangs in an update, is alone, and leaves; the run never stops."""

import time

from chaos_replica import ExtraReplica, extra_replica
from chaos_run import WAITS_S, ChaosRun
from chaos_stack import ChaosStack

from millrace.client import Client
from millrace.v1 import run_service_pb2

BOUND = 1
"""`async_level` of the runs: a replica that is further behind gets nothing new."""
HANGS_S = 8.0


def steps_go_on(run: ChaosRun, count: int) -> int:
    """Return the newest step once `count` more are done than now."""
    before = len(run.steps())
    run.wait_event(lambda _: len(run.steps()) >= before + count, what=f"{count} more steps")
    return run.steps()[-1]


def is_idle(replica: ExtraReplica) -> bool:
    return replica.status().num_requests == 0


def test_replicas_join_fall_behind_hang_die_and_leave_mid_run(chaos: ChaosStack) -> None:
    run = chaos.submit(max_steps=100_000)  # how many steps it takes is the machine's affair: it is cancelled
    run.wait_step(1)
    own = {event.policy_served.replica for event in run.of("policy_served")}
    with extra_replica(chaos, "second") as second:
        joined = run.wait_event(
            lambda event: event.HasField("policy_served") and event.policy_served.replica not in own,
            what="second replica that serves",
        ).policy_served.replica
        wait_busy(second)
        falls_behind(run, second)
        hangs_in_an_update(run, second, joined)
        is_alone(chaos, run, second)
        assert second.terminate() == 0
        steps_go_on(run, 3)
    run.cancel()
    chaos.audit(run)
    assert run.steps() == list(range(len(run.steps()))), "no step was lost or repeated"


def wait_busy(replica: ExtraReplica) -> None:
    """It gets a share of the work."""
    ends = time.monotonic() + WAITS_S
    while is_idle(replica):
        assert time.monotonic() < ends, "the second replica got nothing to do"


def falls_behind(run: ChaosRun, second: ExtraReplica) -> None:
    """Without its store it stays at its version: others go on, it gets nothing new, and it says why."""
    second.set_store(is_there=False)
    held = second.status().version
    run.wait_step(held + BOUND + 2)  # whatever it was given before is finished by then
    ends = time.monotonic() + WAITS_S
    while not is_idle(second):
        assert time.monotonic() < ends, "it still works on what it got before"
    stale = second.status().version
    for _ in range(5):
        newest = steps_go_on(run, 1)
        assert is_idle(second), f"it serves version {stale} and got work for step {newest}"
    told = [message for reason, message in run.warnings() if reason == "POLICY_UPDATE_FAILED"]
    assert any("could not take policy" in message for message in told), told
    second.set_store(is_there=True)
    second.wait_version(newest)
    wait_busy(second)


def hangs_in_an_update(run: ChaosRun, second: ExtraReplica, worker_id: str) -> None:
    """An update that stands still stops only its own replica, and the wait for it has a name."""
    record = second.hang_next_apply(HANGS_S)
    ends = time.monotonic() + WAITS_S
    while not (record.exists() and record.read_text()):
        assert time.monotonic() < ends, "no update reached it"
        time.sleep(0.02)
    began = time.monotonic()
    newest = steps_go_on(run, 5)
    assert time.monotonic() - began < HANGS_S, "the others waited for the one that hangs"
    assert f"replica {worker_id} to serve policy" in " ".join(explain(run))
    second.wait_version(newest)


def is_alone(chaos: ChaosStack, run: ChaosRun, second: ExtraReplica) -> None:
    """The stack's own replica is killed: the second one carries the run until its successor serves."""
    old = chaos.pid("inference")
    chaos.kill("inference")
    steps_go_on(run, 5)
    assert chaos.pid("inference") == old or not chaos._serves("inference"), "its successor was there too early"
    chaos.wait_restarted("inference", old)
    before = len({event.policy_served.replica for event in run.of("policy_served")})
    run.wait_event(
        lambda _: len({event.policy_served.replica for event in run.of("policy_served")}) >= max(3, before),
        what="successor that serves",
    )


def explain(run: ChaosRun) -> list[str]:
    """Every wait that `millrace run why` knows of."""

    async def ask(client: Client) -> run_service_pb2.ExplainRunResponse:
        return await client.runs.explain(run.name)

    answer = run.ask(ask)
    return [wait.reason for wait in answer.waits]
