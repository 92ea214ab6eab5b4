"""A rank's share that a process of its own writes: the bytes that a thread writes, whatever happens to the process."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.errors import InvalidSpecError, InvalidStateError, UnavailableError
from millrace.policies.host_copy import HostCopy
from millrace.processes.table import is_running
from millrace.storage.local import LocalStore
from millrace.telemetry import faults, waits
from millrace.telemetry.faults import Action, Fault, Point
from millrace.trainer.publish import share_process
from millrace.trainer.publish.executor import PROCESS_FROM_BYTES, VARIABLE, Executor
from millrace.trainer.publish.share_process import ShareWriterProcess
from millrace_testing.committed_versions import Trainer

pytestmark = pytest.mark.computes

SKIPS = {"anchor_interval": 6, "skip_deltas": [4]}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def trainer(store: LocalStore) -> Iterator[Trainer]:
    made = Trainer(store, is_process=True, **SKIPS)
    yield made
    made.close()


@pytest.fixture
def gang(store: LocalStore) -> Iterator[Trainer]:
    made = Trainer(store, world_size=2, is_process=True, **SKIPS)
    yield made
    made.close()


def pid_of(trainer: Trainer, rank: int = 0) -> int:
    share = trainer.shares[rank]
    assert isinstance(share, ShareWriterProcess) and share.pid is not None
    return share.pid


def written(store: LocalStore) -> list[tuple[str, bytes]]:
    """Return names and bytes of all objects; what is random in the names is numbered."""
    keys = [info.key for info in store.list("p/")]
    fresh = {key.split("/")[-2]: "" for key in keys if not key.endswith("manifest.json")}
    found = []
    for key in keys:
        name, data = key, store.get(key)
        for random in fresh:
            name = name.replace(random, "e1-random")
            data = data.replace(random.encode(), b"e1-random")
        found.append((name, data))
    return sorted(found)


def manifests(store: LocalStore) -> list[str]:
    return sorted(info.key for info in store.list("p/") if "manifest" in info.key)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_process_writes_the_bytes_of_a_thread(tmp_path: Path, world_size: int) -> None:
    stores = [LocalStore(tmp_path / name) for name in ("thread", "process")]
    trainers = [
        Trainer(store, world_size=world_size, is_process=store is stores[1], **SKIPS).publish_to(9) for store in stores
    ]
    assert manifests(stores[0]) == manifests(stores[1])
    one, other = written(stores[0]), written(stores[1])
    assert [name for name, _ in one] == [name for name, _ in other]
    for (name, data), (_, again) in zip(one, other, strict=True):
        if not name.endswith("manifest.json"):
            assert data == again, name
            continue
        assert {**json.loads(data), "created": ""} == {**json.loads(again), "created": ""}, name
    assert [[delta.base for delta in trainers[1].manifest(v).deltas] for v in (1, 4, 8)] == [[0], [0, 3], [4, 7]]
    pids = [pid_of(trainers[1], rank) for rank in range(world_size)]
    trainers[1].close()
    trainers[1].close()
    assert not any(is_running(pid) for pid in pids)


def test_a_version_whose_process_is_killed_is_published_by_another(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "faults"))
    trainer.publish_to(2)
    fired = faults.arm(tmp_path / "faults", Fault(point=Point.TRAINER_MID_UPLOAD))
    before = pid_of(trainer)
    trainer.publish_to(3)
    assert json.loads(fired.read_text())["pid"] == before != pid_of(trainer)
    [death] = trainer.deaths[0]
    assert (death.reason, death.message) == (
        "PUBLISHER_DIED",
        "the process that publishes died while it had to upload policy 3: signal SIGKILL",
    )
    trainer.publish_to(13)
    copy = HostCopy(trainer.store)
    for version in range(14):
        staged = trainer.require(copy, version)
        assert version == 0 or staged.base == (0, version - 1)
    assert len(manifests(trainer.store)) == 14  # each once
    # The new process knew the version before, not the one that skips begin with; from the next multiple on it has one.
    assert [[delta.base for delta in trainer.manifest(v).deltas] for v in (3, 4, 8, 12)] == [[2], [3], [4, 7], [8, 11]]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_died_or_stopped_between_two_versions_is_replaced(
    trainer: Trainer, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish_to(1)
    before = pid_of(trainer)
    os.kill(before, number)
    monkeypatch.setattr(share_process, "SILENT_S", 5.0)
    trainer.publish_to(2)
    how = "signal SIGKILL" if number == signal.SIGKILL else "it said nothing for 5 s and was killed"
    assert [death.message.partition(": ")[2] for death in trainer.deaths[0]] == [how]
    assert not is_running(before)
    assert [delta.base for delta in trainer.manifest(2).deltas] == [1]
    trainer.require(HostCopy(trainer.store), 2)


def test_a_death_at_one_rank_has_all_ranks_do_the_version_again(
    gang: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "faults"))
    gang.publish_to(3)
    before = [pid_of(gang, rank) for rank in (0, 1)]
    fired = faults.arm(tmp_path / "faults", Fault(point=Point.TRAINER_MID_UPLOAD))
    gang.publish_to(4)
    dead = before.index(json.loads(fired.read_text())["pid"])
    after = [pid_of(gang, rank) for rank in (0, 1)]
    assert after[dead] != before[dead] and after[1 - dead] == before[1 - dead]
    assert [len(deaths) for deaths in gang.deaths] == [1, 1]
    assert f"the process that publishes at rank {dead} died" in gang.deaths[1 - dead][0].message
    assert [delta.base for delta in gang.manifest(4).deltas] == [3]  # one rank has no base of the skip any more
    assert [delta.base for delta in gang.publish_to(8).manifest(8).deltas] == [4, 7]
    gang.require(HostCopy(gang.store), 8)


def test_what_cannot_start_ends_the_attempt_with_its_cause(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_process, "MODULE", "millrace.no_such_module")
    [error] = trainer.commit(0)
    assert isinstance(error, UnavailableError) and error.reason == "PUBLISHER_DIED"
    assert error.message == "the process that publishes died while it had to start: exit code 1 (3 deaths in a row)"
    assert "MILLRACE_TRAINER_PUBLISH=thread" in str(error.remedy)
    assert len(trainer.deaths[0]) == 2 and not manifests(trainer.store)
    monkeypatch.undo()
    trainer.publish(0)


def test_errors_are_those_of_a_thread(tmp_path: Path) -> None:
    """The directory of the store is a file by now."""
    errors = []
    for is_process in (False, True):
        directory = tmp_path / str(is_process)
        trainer = Trainer(LocalStore(directory), is_process=is_process)
        [encoded] = trainer.at_every_rank(lambda rank, parts, it=trainer: it.shares[rank].encode(parts, 0))
        assert not isinstance(encoded, Exception)
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir()
        directory.rmdir()
        directory.write_text("")
        [error] = trainer.at_every_rank(
            lambda rank, parts, it=trainer: it.shares[rank].upload("p/x/", parts, 0, is_anchor=True, bases=())
        )
        errors.append((type(error), getattr(error, "reason", ""), str(error).replace(str(directory), "")))
        trainer.close()
    assert errors[0] == errors[1]


def test_nothing_is_started_behind_the_end(trainer: Trainer) -> None:
    trainer.publish(0)
    trainer.close()
    [error] = trainer.commit(1)
    assert isinstance(error, InvalidStateError) and error.reason == "POLICY_ABANDONED"


def test_waiting_for_it_says_what_for(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "faults"))
    monkeypatch.setattr(share_process, "QUIET_S", 0.0)
    faults.arm(tmp_path / "faults", Fault(point=Point.TRAINER_MID_UPLOAD, action=Action.SLEEP, seconds=1.0))
    seen: set[str] = set()
    ask = share_process.HelperProcess.ask

    def look(self, question, files=(), **more):  # type: ignore[no-untyped-def]
        seen.update(wait.reason for wait in waits.snapshot("trainer"))
        return ask(self, question, files, **more)

    monkeypatch.setattr(share_process.HelperProcess, "ask", look)
    trainer.publish(0)
    assert "policy 0 to be uploaded by the process that publishes" in seen


def test_waiting_for_it_names_what_it_waits_for_itself() -> None:
    with waits.waiting("policy 3", waits_on="object store", deadline_s=60.0):
        beat = share_process.beat()
    told = share_process.waited_for("policy 3 to be uploaded", beat)
    assert told == {"reason": "policy 3 to be uploaded: policy 3", "waits_on": "object store", "deadline_s": 60.0}
    told = share_process.waited_for("policy 3 to be encoded", share_process.beat())
    assert told == {"reason": "policy 3 to be encoded", "waits_on": "", "deadline_s": 0.0}  # it works


def test_who_publishes() -> None:
    url = "file:///somewhere"
    large, small = PROCESS_FROM_BYTES, PROCESS_FROM_BYTES - 1
    assert Executor.chosen({}) is Executor.AUTO
    assert Executor.AUTO.is_process(share_bytes=large, store_url=url)
    assert not Executor.AUTO.is_process(share_bytes=small, store_url=url)
    assert Executor.chosen({VARIABLE: "process"}).is_process(share_bytes=0, store_url=url)
    assert not Executor.chosen({VARIABLE: "thread"}).is_process(share_bytes=large, store_url=url)
    assert not Executor.PROCESS.is_process(share_bytes=large, store_url="")
    with pytest.raises(InvalidSpecError, match=r"MILLRACE_TRAINER_PUBLISH.*auto, thread, process"):
        Executor.chosen({VARIABLE: "fork"})
