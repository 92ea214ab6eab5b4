"""A damaged store ends a real run as FAILED; it is repaired from a replica, resumed, and ends like any other."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from millrace.errors import UnavailableError
from millrace.runlog.names import Names
from millrace.telemetry.faults import Point
from millrace.v1 import run_pb2
from millrace_testing.chaos.run import ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack

pytestmark = pytest.mark.long

POINTS = [Point.ORCHESTRATOR_REOPEN_INTENT, Point.ORCHESTRATOR_REOPENED, Point.ORCHESTRATOR_REOPEN_QUEUED]


def damage(chaos: ChaosStack, run: ChaosRun) -> int:
    """Damage every checkpoint in one bit, and remove a chunk of the first batch, so that the start model is no way out.

    Return how many checkpoint objects that are.
    """
    store, names = chaos.store(), Names(PREFIX, run.uid)
    listed = [info.key for info in store.list(names.checkpoints)]
    whole = [key.rpartition("manifest")[0] for key in listed if "/manifest" in key]
    keys = [key for key in listed if "/manifest" not in key and key.startswith(tuple(whole))]
    assert keys, listed
    for key in keys:
        data = bytearray(store.get(key))
        data[len(data) // 2] ^= 1
        store.delete(key)
        store.put(key, bytes(data))
    chunk = next(info.key for info in store.list(f"{names.batches}00000000/"))
    store.delete(chunk)
    return len(keys)


def fail(chaos: ChaosStack, run: ChaosRun, replica: Path) -> int:
    """Pause it, copy the store, damage it, and let it go on with a trainer that has to read it: to its end."""
    run.wait_step(2)
    run.pause()
    chaos.freeze("trainer")  # it may still write its newest checkpoint: the replica has all that is damaged
    source = chaos.store().uri("x").removesuffix("/x").removeprefix("file://")
    shutil.copytree(source, replica, ignore=shutil.ignore_patterns(".tmp"))  # others still write to it
    count, pid = damage(chaos, run), chaos.pid("trainer")
    chaos.kill("trainer")
    chaos.wait_restarted("trainer", pid)
    run.resume()
    run.wait_state(run_pb2.RUN_STATE_FAILED)
    return count


def follow(chaos: ChaosStack, run: ChaosRun) -> ChaosRun:
    return ChaosRun(address=chaos.address, name=run.name, uid=run.uid)


def repair(chaos: ChaosStack, run: ChaosRun, *options: str) -> list[dict]:
    store = chaos.store().uri("x").removesuffix("/x")
    command = ("run", "repair", run.name, "--store", store, "--prefix", PREFIX, "--json", *options)
    said = chaos.workplace.millrace(*command)
    return json.loads(said[said.index("{") :])["repairs"]


@pytest.mark.parametrize("point", [POINTS[0], *(pytest.param(point, marks=pytest.mark.slow) for point in POINTS[1:])])
def test_a_run_that_a_damaged_store_ended_is_repaired_and_resumed(
    chaos: ChaosStack, tmp_path: Path, point: Point
) -> None:
    run = chaos.submit(max_steps=6)
    count = fail(chaos, run, tmp_path / "replica")
    done = repair(chaos, run, "--from", f"file://{tmp_path}/replica", "--apply")
    assert [each["state"] for each in done] == ["restored"] * (count + 1)
    fault = chaos.arm(point)
    with contextlib.suppress(UnavailableError):  # it is killed while it answers
        run.resume()
    fault.wait()
    chaos.wait_ready()
    run.resume()  # where the first one was not acknowledged; else it changes nothing
    resumed = follow(chaos, run)
    report = chaos.finish(resumed)
    assert sorted(set(resumed.steps())) == list(range(6)) and report.is_closed
    aside = [info.key for info in chaos.store().list(f"{Names(PREFIX, run.uid).root}quarantine/")]
    assert len(aside) == count, "what was damaged is still there"
