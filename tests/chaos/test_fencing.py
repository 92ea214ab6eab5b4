"""Two orchestrators or two trainers on one run: the older epoch is refused everywhere, says so, and changes nothing."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.internal.v1 import batch_pb2
from millrace.local.directory import free_port
from millrace.local.redis import die_with_parent
from millrace.runlog.names import Names, Stream
from millrace.telemetry.faults import Action, Point
from millrace_testing.chaos.logs import wait_line
from millrace_testing.chaos.run import ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack

pytestmark = pytest.mark.long

REFUSED_WITHIN_S = 90.0
REFUSALS = (
    "was lost to another orchestrator; that one continues the run",  # when it renews its lease
    "another process holds a newer epoch",  # when it commits or appends
    "was committed with other content",  # when it creates the header
    "generation 1, Redis has ",  # whatever it does in a Redis that was wiped and rebuilt, once or more, by the other
)
"""What an older orchestrator is told, whichever comes first."""
KEPT_STREAMS = (Stream.POLICIES, Stream.EVENTS)
"""Of the others the holder trims what it has archived."""


@pytest.fixture(scope="module")
def first_stack(warm) -> Iterator[ChaosStack]:
    # Not forked: a second trainer starts with the environment of the first, which the kernel shows of programs only.
    with ChaosStack(warm, "first", options=("--no-liveness",), env={"MILLRACE_FORK_SERVER": "0"}) as stack:
        yield stack


@pytest.fixture
def first(first_stack: ChaosStack) -> ChaosStack:
    first_stack.disarm()
    first_stack.wait_ready()
    return first_stack


@dataclass(frozen=True)
class Traces:
    """Everything that a run has left: objects by key, entries by stream and id."""

    objects: dict[str, bytes]
    entries: dict[Stream, dict[bytes, dict[bytes, bytes]]]

    @classmethod
    def of(cls, stack: ChaosStack, run: ChaosRun) -> "Traces":
        names, store, client = Names(PREFIX, run.uid), stack.store(), stack.redis()
        objects = {info.key: store.get(info.key) for info in store.list(f"{PREFIX}/runs/{run.uid}/")}
        entries = {stream: dict(client.xrange(names.stream(stream))) for stream in Stream}  # pyright: ignore
        return cls(objects, entries)

    def require_kept(self, later: "Traces") -> None:
        """Nothing that is here is another there; only trimmed entries may be missing."""
        changed = [key for key, data in self.objects.items() if later.objects.get(key) != data]
        assert not changed, f"objects changed or gone: {changed}"
        for stream, entries in self.entries.items():
            for entry_id, fields in entries.items():
                found = later.entries[stream].get(entry_id)
                assert found == fields or (found is None and stream not in KEPT_STREAMS), f"{stream} {entry_id!r}"


def _headers(traces: Traces) -> list[batch_pb2.BatchHeader]:
    keys = sorted(key for key in traces.objects if "/batches/" in key and key.endswith(".pb") and key.count("/") == 4)
    return [batch_pb2.BatchHeader.FromString(traces.objects[key]) for key in keys]


@pytest.fixture
def spare_trainer(first: ChaosStack) -> Iterator[Path]:
    """Yield a second trainer process of the first stack; the path of its log."""
    environ = Path(f"/proc/{first.pid('trainer')}/environ").read_bytes().split(b"\0")
    env = dict(pair.decode().split("=", 1) for pair in environ if b"=" in pair)
    env["MILLRACE_LISTEN"] = f"127.0.0.1:{free_port()}"
    del env["MILLRACE_METRICS_LISTEN"]
    log_path = first.directory / "logs" / "spare.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "millrace.trainer.main"],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=first.workplace.path,
            preexec_fn=die_with_parent,
        )
    try:
        yield log_path
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_wiped", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "Redis wiped"])
def test_two_trainers(first: ChaosStack, spare_trainer: Path, is_wiped: bool) -> None:
    fault = first.arm(Point.TRAINER_AFTER_MANIFEST, Action.FREEZE, when={"version": 3})
    run = first.submit(max_steps=6)
    frozen = fault.wait(run)["pid"]
    logs = {True: first.directory / "logs" / "trainer.log", False: spare_trainer}
    old_log = logs[frozen == first.pid("trainer")]
    if is_wiped:
        first.redis().flushall()
    run.wait_event(lambda e: e.HasField("policy_published") and e.policy_published.version >= 4, what="policy 4")
    before = Traces.of(first, run)
    thawed_at = time.time()
    first.thaw(frozen)
    line = wait_line(old_log, "run released", since=thawed_at, timeout_s=REFUSED_WITHIN_S)
    lost = (
        f"the trainer lease of run {run.uid} was lost",
        f"trainer epoch 2 of run {run.uid} exists, this trainer holds 1",
    )
    assert any(f"{words}; another trainer continues the run" in line for words in lost), line
    first.finish(run)
    after = Traces.of(first, run)
    before.require_kept(after)
    assert len([key for key in after.objects if "/epochs/trainer/" in key]) == 2


def test_a_trainer_that_wakes_up_creates_no_version(first: ChaosStack, spare_trainer: Path) -> None:
    """Where a second trainer's weights may differ (best effort) it would take a version's name for good."""
    fault = first.arm(Point.TRAINER_BEFORE_MANIFEST, Action.FREEZE, when={"version": 3})
    run = first.submit(max_steps=6, **{"trainer.determinism": "best_effort", "ckpt.interval": 1})
    frozen = fault.wait(run)["pid"]
    old_log = first.directory / "logs" / "trainer.log" if frozen == first.pid("trainer") else spare_trainer
    step = first.arm(Point.TRAINER_AFTER_STEP, Action.FREEZE, when={"step": 2})  # its successor, before it publishes
    successor = step.wait(run)["pid"]
    assert successor != frozen
    thawed_at = time.time()
    first.thaw(frozen)
    line = wait_line(old_log, "run released", since=thawed_at, timeout_s=REFUSED_WITHIN_S)
    assert "another trainer continues the run" in line, line
    first.thaw(successor)
    first.finish(run)
    traces = Traces.of(first, run)
    uploaded = [key for key in traces.objects if "-00000003/e1-" in key]
    assert uploaded, "it was about to create version 3"
    manifests = [data.decode() for key, data in traces.objects.items() if key.endswith("-00000003/manifest.json")]
    assert manifests and not any(key in manifest for key in uploaded for manifest in manifests)


# After the tests of the trainers, so that no other orchestrator and its trainer take part in these.


@pytest.fixture(scope="module")
def second_stack(warm, first_stack: ChaosStack) -> Iterator[ChaosStack]:
    """Yield a whole stack on the Redis and the object store of the first."""
    place = json.loads((first_stack.directory / "stack.json").read_text())
    env = {"MILLRACE_REDIS_URL": first_stack.redis_url, "MILLRACE_STORE_URL": place["store"]}
    with ChaosStack(warm, "second", options=("--no-liveness",), env=env) as stack:
        yield stack


@pytest.mark.parametrize(
    ("point", "is_wiped"),
    [
        pytest.param(Point.ORCHESTRATOR_MID_COMMIT, False, marks=pytest.mark.slow),
        (Point.ORCHESTRATOR_AFTER_HEADER, True),
    ],
    ids=["before the header", "before the append, Redis wiped"],
)
def test_two_orchestrators(first: ChaosStack, second_stack: ChaosStack, point: Point, is_wiped: bool) -> None:
    second = second_stack
    second.wait_ready()
    waiting = second.freeze("orchestrator")  # so that the first one claims the run
    fault = first.arm(point, Action.FREEZE, when={"step": 2})
    submitted = first.submit(max_steps=6)
    frozen = fault.wait(submitted)["pid"]
    second.thaw(waiting)
    if is_wiped:
        second.redis().flushall()
    run = ChaosRun(address=second.address, name=submitted.name, uid=submitted.uid)
    run.wait_event(lambda e: e.HasField("batch_committed") and e.batch_committed.step >= 3, what="batch of the second")
    before = Traces.of(second, run)
    thawed_at = time.time()
    first.thaw(frozen)
    line = wait_line(
        first.directory / "logs" / "orchestrator.log",
        "run given up by this replica",
        since=thawed_at,
        timeout_s=REFUSED_WITHIN_S,
    )
    assert any(words in line for words in REFUSALS) and run.name.removeprefix("runs/") in line, line
    second.finish(run)
    after = Traces.of(second, run)
    before.require_kept(after)
    epochs = [header.writer_epoch for header in _headers(after)]
    assert epochs == sorted(epochs) and set(epochs) == {1, 2}, f"nothing by the first behind the second: {epochs}"
    assert len([key for key in after.objects if "/epochs/orchestrator/" in key]) == 2, "and it did not come back"
