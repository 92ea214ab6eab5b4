"""Two inference replicas: one joins, falls behind, hangs in an update, is alone, and leaves; the run never stops."""

import signal
import time

import pytest

from millrace.client import Client
from millrace.policies.fetch import read_manifest
from millrace.runlog.names import Names
from millrace.telemetry.faults import Action, Point
from millrace.v1 import run_service_pb2
from millrace_testing.chaos.replica import ExtraReplica, extra_replica
from millrace_testing.chaos.run import WAITS_S, ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack

ANCHOR_INTERVAL = 12
BOUND = 1
"""`async_level` of the runs: a replica that is further after gets nothing new."""
HANGS_S = 8.0
"""How long an update hangs, on a machine on which five steps take less than a quarter of it."""


def steps_go_on(run: ChaosRun, count: int) -> int:
    """Return the newest step once `count` more are done than now."""
    before = len(run.steps())
    run.wait_event(lambda _: len(run.steps()) >= before + count, what=f"{count} more steps")
    return run.steps()[-1]


def is_idle(replica: ExtraReplica) -> bool:
    return replica.status().num_requests == 0


@pytest.mark.long
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
    began = time.monotonic()
    steps_go_on(run, 5)
    hangs_s = max(HANGS_S, 4 * (time.monotonic() - began))
    record = second.hang_next_apply(hangs_s)
    ends = time.monotonic() + WAITS_S
    while not (record.exists() and record.read_text()):
        assert time.monotonic() < ends, "no update reached it"
        time.sleep(0.02)
    began = time.monotonic()
    newest = steps_go_on(run, 5)
    assert time.monotonic() - began < hangs_s, "the others waited for the one that hangs"
    assert f"replica {worker_id} to serve policy" in " ".join(explain(run))
    second.wait_version(newest)


def is_alone(chaos: ChaosStack, run: ChaosRun, second: ExtraReplica) -> None:
    """The stack's own replica is killed: the second one carries the run until its successor serves."""
    old, before = chaos.pid("inference"), served_by(run)
    chaos.kill("inference")
    fault = chaos.arm(Point.INFERENCE_MID_DOWNLOAD, Action.FREEZE)  # until we have seen enough
    frozen = fault.wait(run)["pid"]
    steps_go_on(run, 5)
    assert served_by(run) == before, "its successor was there too early"
    chaos.thaw(frozen)
    chaos.wait_restarted("inference", old)
    run.wait_event(lambda _: served_by(run) > before, what="successor that serves")


def served_by(run: ChaosRun) -> set[str]:
    """Return every replica that has ever told that it serves a version."""
    return {event.policy_served.replica for event in run.of("policy_served")}


@pytest.mark.slow
def test_a_replica_outlives_torn_policies_and_another_dies_in_a_download(chaos: ChaosStack) -> None:
    run = chaos.submit(
        max_steps=100_000, **{"trainer.policy.anchor_interval": ANCHOR_INTERVAL, "trainer.policy.skip_deltas": "[]"}
    )
    run.wait_step(1)
    with extra_replica(chaos, "torn") as second:
        second.wait_version(1)
        second.set_store(is_there=False)
        held = second.status().version
        torn = tear_what_is_served(chaos, run, behind=held)
        assert torn > held and second.status().version == held
        second.set_store(is_there=True)
        print(second.said("has sha256"))  # is what it says of damage alone
        second.wait_version(torn + 1)  # by the next anchor; proved, as every version that is served
        second.die_in_next_download()
        assert second.process.wait(WAITS_S) == -signal.SIGKILL
        steps_go_on(run, 3)
    with extra_replica(chaos, "torn") as third:
        third.wait_version(run.steps()[-1])
        wait_busy(third)
        assert third.terminate() == 0
    run.wait_step(torn + 2 * ANCHOR_INTERVAL)  # the audit looks at the objects of the newest versions
    run.cancel()
    chaos.audit(run)
    assert run.steps() == list(range(len(run.steps()))), "no step was lost or repeated"


def tear_what_is_served(chaos: ChaosStack, run: ChaosRun, *, behind: int) -> int:
    """Cut every object of the versions behind `behind` in half, where they are, up to one that the stack's own replica
    serves and that is not followed by an anchor soon; returns it."""
    store, names = chaos.store(), Names(PREFIX, run.uid)
    while True:
        newest = steps_go_on(run, 1) - 1
        manifest = read_manifest(store, names.policy_manifest(0, newest))
        if behind + 3 <= newest and manifest.version - manifest.anchor < ANCHOR_INTERVAL // 2:
            break
    run.wait_event(lambda e: e.HasField("policy_served") and e.policy_served.version >= newest, what="policy served")
    for version in range(behind + 1, newest + 1):
        for encoding in read_manifest(store, names.policy_manifest(0, version)).encodings:
            for entry in encoding.objects:
                data = store.get(entry.key)
                store.put(entry.key, data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    return newest


def explain(run: ChaosRun) -> list[str]:
    """Return every wait that `millrace run why` knows of."""

    async def ask(client: Client) -> run_service_pb2.ExplainRunResponse:
        return await client.runs.explain(run.name)

    answer = run.ask(ask)
    return [wait.reason for wait in answer.waits]
