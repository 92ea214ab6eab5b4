"""Every operation of the S3 store against every way that the network and the server fail, through the fault proxy."""

import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig
from s3transfer.manager import TransferCoordinatorController

from millrace.errors import CapacityError, CorruptObjectError, MillraceError, NotFoundError, UnavailableError
from millrace.storage import s3
from millrace.storage.clean_up import RetryPolicy
from millrace.storage.s3 import S3Store
from millrace.telemetry import waits
from millrace_testing.chaos.fault_proxy import Effect, Fault, FaultProxy
from millrace_testing.lanes import pairs_by_default

DATA = bytes(range(256)) * 400
"""100 kB that is different at each half and offset."""

Operation = Callable[[S3Store, Path], object]

WRITES: dict[str, tuple[str, Operation]] = {
    "put": ("PUT", lambda store, _: store.put("w", DATA)),
    "create": ("PUT", lambda store, _: store.create("w", DATA)),
    "put_file": ("PUT", lambda store, directory: store.put_file("w", directory / "source")),
}
READS: dict[str, tuple[str, Operation, object]] = {
    "get": ("GET", lambda store, _: store.get("r"), DATA),
    "get_range": ("GET", lambda store, _: store.get_range("r", 1000, 50_000), DATA[1000:51_000]),
    "get_file": ("GET", lambda store, d: (store.get_file("r", d / "t"), (d / "t").read_bytes())[1], DATA),
    "list": ("LIST", lambda store, _: [info.key for info in store.list("")], ["dir/x", "r"]),
    "list_prefixes": ("LIST", lambda store, _: list(store.list_prefixes("")), ["dir/"]),
}
BROKEN = [
    Fault(effect=Effect.ANSWER, status=500, code="InternalError"),
    Fault(effect=Effect.ANSWER, status=503, code="SlowDown"),
    Fault(effect=Effect.ANSWER, status=429, code="TooManyRequests"),
    Fault(effect=Effect.ANSWER, status=400, code="RequestTimeout"),
    Fault(effect=Effect.RESET),
    Fault(effect=Effect.LOSE_ANSWER),
]
TORN_WRITES = [
    Fault(effect=Effect.CUT_REQUEST),
    Fault(effect=Effect.TORN_WRITE),
    Fault(effect=Effect.ANSWER, status=400, code="IncompleteBody"),
    Fault(effect=Effect.ANSWER, status=400, code="XAmzContentSHA256Mismatch"),
]


def _name(fault: Fault | str) -> str:
    if isinstance(fault, str):
        return fault
    return f"{fault.effect}-{fault.code}" if fault.effect is Effect.ANSWER else str(fault.effect)


def _again(fault: Fault, *, method: str, times: int | None) -> Fault:
    return Fault(effect=fault.effect, method=method, status=fault.status, code=fault.code, times=times)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(DATA)
    return tmp_path


@pytest.mark.parametrize(("name", "fault"), pairs_by_default(WRITES, [*BROKEN, *TORN_WRITES]), ids=_name)
def test_a_write_survives_failures_and_stores_its_bytes(proxy: FaultProxy, faulty_store, directory, name, fault):
    method, operation = WRITES[name]
    if name == "create" and fault.effect is Effect.TORN_WRITE:
        pytest.skip("below: a store that keeps half an object makes that half the winner")
    armed = proxy.add(_again(fault, method=method, times=2))
    assert operation(faulty_store, directory) in (None, True)
    assert armed.struck == 2
    assert faulty_store.get("w") == DATA


@pytest.mark.parametrize(
    ("name", "fault"), pairs_by_default(READS, [*BROKEN, Fault(effect=Effect.CUT_ANSWER)]), ids=_name
)
def test_a_read_survives_failures_and_gives_every_byte(proxy: FaultProxy, faulty_store, directory, name, fault):
    method, operation, expected = READS[name]
    faulty_store.put("r", DATA)
    faulty_store.put("dir/x", b"")
    armed = proxy.add(_again(fault, method=method, times=2))
    assert operation(faulty_store, directory) == expected
    assert armed.struck == 2
    assert not list(directory.glob(".*.part"))


@pytest.mark.parametrize("fault", [fault for fault in BROKEN if fault.status != 400], ids=_name)
def test_head_and_delete_survive_failures(proxy: FaultProxy, faulty_store, fault):
    faulty_store.put("r", DATA)
    proxy.add(_again(fault, method="HEAD", times=2))
    proxy.add(_again(fault, method="DELETE", times=2))
    info = faulty_store.head("r")
    assert info is not None and info.size_bytes == len(DATA)
    faulty_store.delete("r")
    assert faulty_store.head("r") is None


def test_a_list_that_fails_behind_its_first_page_goes_on_there(proxy: FaultProxy, faulty_store, monkeypatch):
    client = faulty_store.client
    monkeypatch.setattr(client, "list_objects_v2", functools.partial(client.list_objects_v2, MaxKeys=3))
    keys = [f"many/{number}" for number in range(8)]
    for key in keys:
        faulty_store.put(key, b"")
    armed = proxy.add(Fault(effect=Effect.CUT_ANSWER, method="LIST", skip=1, times=2))
    assert [info.key for info in faulty_store.list("many/")] == keys
    assert armed.struck == 2 and proxy.count("LIST") == 3 + 2


# Create-only: who won must be decidable however often an answer is lost.


def test_a_create_whose_every_answer_but_the_last_is_lost_is_ours(proxy: FaultProxy, faulty_store):
    proxy.add(Fault(effect=Effect.LOSE_ANSWER, method="PUT", times=4))
    assert faulty_store.create("c", b"mine, with a nonce") is True
    assert faulty_store.create("c", b"mine, with another nonce") is False


def test_a_create_that_lost_to_another_while_its_answers_were_lost(proxy: FaultProxy, faulty_store):
    assert faulty_store.create("c", b"theirs")
    lost = proxy.add(Fault(effect=Effect.RESET, method="PUT", times=1))
    compared = proxy.add(Fault(effect=Effect.CUT_ANSWER, method="GET", times=1))
    assert faulty_store.create("c", b"mine") is False
    assert lost.struck == compared.struck == 1, "it had to compare, and to compare again"
    assert faulty_store.get("c") == b"theirs"


def test_sixteen_creates_race_while_answers_are_lost_and_one_wins(proxy: FaultProxy, faulty_store):
    for effect in (Effect.LOSE_ANSWER, Effect.RESET, Effect.CUT_REQUEST, Effect.LOSE_ANSWER):
        proxy.add(Fault(effect=effect, method="PUT", key="*/race", times=5))
    won: list[int] = []

    def race(me: int) -> None:
        if faulty_store.create("race", b"nonce of %d" % me):
            won.append(me)

    threads = [threading.Thread(target=race, args=(me,)) for me in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert faulty_store.get("race") == b"nonce of %d" % won[0]


def test_a_create_that_the_store_tore_is_not_ours(proxy: FaultProxy, faulty_store):
    """A store without checks keeps half the bytes: no writer takes that for its own object."""
    proxy.add(Fault(effect=Effect.TORN_WRITE, method="PUT", times=1))
    assert faulty_store.create("c", DATA) is False
    assert faulty_store.get("c") == DATA[: len(DATA) // 2]


def test_a_name_that_is_being_deleted_is_asked_for_again(proxy: FaultProxy, faulty_store):
    proxy.add(Fault(effect=Effect.ANSWER, method="PUT", status=404, code="NoSuchKey", times=1))
    proxy.add(Fault(effect=Effect.ANSWER, method="PUT", status=409, code="ConditionalRequestConflict", times=1))
    assert faulty_store.create("c", b"mine") is True


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_signed_with_their_hash_so_that_the_server_can_refuse_torn_ones(
    proxy: FaultProxy, faulty_store, directory, name
):
    WRITES[name][1](faulty_store, directory)
    sent = next(request for request in proxy.requests if request.method == "PUT")
    assert sent.headers["x-amz-content-sha256"] == hashlib.sha256(DATA).hexdigest()
    assert sent.headers["content-length"] == str(len(DATA))


# Bounded, visible, typed.


@pytest.mark.parametrize("name", [*WRITES, *READS])
def test_an_outage_ends_every_operation_with_a_name_and_a_remedy(proxy: FaultProxy, make_store, directory, name):
    store = make_store(RetryPolicy(deadline_s=10, max_attempts=3))
    method, operation = (WRITES.get(name) or READS[name])[:2]
    proxy.add(Fault(effect=Effect.ANSWER, status=503, code="SlowDown"))
    with pytest.raises(UnavailableError, match=r"HTTP 503 SlowDown; check that it runs.*MILLRACE_STORE_URL") as caught:
        operation(store, directory)
    assert proxy.count(method) == 3, "bounded"
    assert proxy.endpoint in str(caught.value) and store.uri("").rstrip("/") in str(caught.value)
    assert caught.value.reason == "STORE_UNREACHABLE"


def test_a_hanging_request_shows_itself_and_is_given_up(proxy: FaultProxy, make_store, monkeypatch):
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 3.0)
    store = make_store(RetryPolicy(deadline_s=30, max_attempts=8))
    hanging = proxy.add(Fault(effect=Effect.HANG, method="PUT", times=1))
    proxy.add(Fault(effect=Effect.ANSWER, method="PUT", times=2))
    seen: dict[str, float] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            seen.update({wait.reason: wait.age_s for wait in waits.snapshot("me")})

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    store.put("k", DATA)
    seconds = time.monotonic() - began
    done.set()
    watcher.join()
    assert hanging.struck == 1 and 3 <= seconds < 10
    named = f"object store {store.describe()}: PUT {store.uri('k')}"
    assert seen[named] > 2, "already the first attempt is a wait, with its age"
    assert any(reason.startswith(f"{named}, attempt 3 of at most 8 after HTTP 503 SlowDown") for reason in seen)
    assert max(seen.values()) > 3, "the age is that of the whole operation, not of the last attempt"
    assert waits.snapshot("me") == []


def test_slow_transfers_are_no_failures(proxy: FaultProxy, make_store, directory):
    store = make_store(RetryPolicy(deadline_s=5, max_attempts=1))
    slow = proxy.add(Fault(effect=Effect.SLOW, rate=100_000))
    for _, operation in WRITES.values():
        operation(store, directory)
    assert store.get("w") == DATA
    assert slow.struck == 4, "each once"


def test_a_trickle_is_given_up(proxy: FaultProxy, make_store, monkeypatch):
    monkeypatch.setattr(s3, "ATTEMPT_S", 0.5)
    monkeypatch.setattr(s3, "COPY_BYTES", 1000)
    store = make_store(RetryPolicy(deadline_s=20, max_attempts=3))
    store.put("k", DATA)
    proxy.add(Fault(effect=Effect.SLOW, method="GET", rate=4000, times=1))
    began = time.monotonic()
    assert store.get("k") == DATA
    assert time.monotonic() - began < 15, "100 kB at 4 kB/s would take 25 s"


@pytest.mark.parametrize(("status", "code"), [(507, "InsufficientStorage"), (403, "QuotaExceeded")])
def test_a_full_bucket_is_waited_for_and_then_named(proxy: FaultProxy, make_store, status, code):
    store = make_store(RetryPolicy(deadline_s=10, max_attempts=3))
    full = proxy.add(Fault(effect=Effect.ANSWER, method="PUT", status=status, code=code))
    with pytest.raises(CapacityError, match=rf"no room for PUT s3://.*/k: HTTP {status} {code}; free space") as caught:
        store.put("k", DATA)
    assert full.struck == 3 and caught.value.reason == "STORE_FULL" and caught.value.retry_after_s
    proxy.clear()
    proxy.add(Fault(effect=Effect.ANSWER, method="PUT", status=status, code=code, times=2))
    store.put("k", DATA)
    assert store.get("k") == DATA, "as soon as there is room"


def test_an_answer_that_is_no_s3_answer(proxy: FaultProxy, faulty_store):
    """A load balancer in front of a store that restarts answers 200 with a page of its own."""
    faulty_store.put("r", DATA)
    page = proxy.add(Fault(effect=Effect.ANSWER, method="LIST", status=200, code="<html", times=1))
    assert [info.key for info in faulty_store.list("")] == ["r"]
    assert page.struck == 1


def test_a_local_file_that_fails_is_not_the_stores_fault(proxy: FaultProxy, faulty_store, tmp_path):
    with pytest.raises(UnavailableError, match=r"cannot read .*nope: No such file"):
        faulty_store.put_file("k", tmp_path / "nope")
    faulty_store.put("k", DATA)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MillraceError, match=r"cannot write .*file/below"):
        faulty_store.get_file("k", tmp_path / "file" / "below")
    assert proxy.count("GET") == 0 and proxy.count("PUT") == 1, "nothing was retried over the network"


def test_absent_and_short_objects_are_answers_and_not_retried(proxy: FaultProxy, faulty_store, tmp_path):
    for call in (
        lambda: faulty_store.get("no"),
        lambda: faulty_store.get_range("no", 0, 1),
        lambda: faulty_store.get_file("no", tmp_path / "x"),
    ):
        with pytest.raises(NotFoundError, match=r"no object s3://"):
            call()
    faulty_store.put("short", b"12345")
    with pytest.raises(CorruptObjectError, match="ends before byte 9"):
        faulty_store.get_range("short", 4, 5)
    assert proxy.count("GET") == 4


def test_a_file_in_parts_survives_failures_of_parts(proxy: FaultProxy, faulty_store, tmp_path, monkeypatch):
    five_mb = 5 << 20  # the smallest part that the protocol allows
    monkeypatch.setattr(s3, "TRANSFER", TransferConfig(multipart_threshold=five_mb, multipart_chunksize=five_mb))
    data = os.urandom(11 << 20)
    (tmp_path / "big").write_bytes(data)
    proxy.add(Fault(effect=Effect.ANSWER, method="PUT", times=1, skip=2))
    proxy.add(Fault(effect=Effect.ANSWER, method="POST", times=1, skip=1))
    faulty_store.put_file("big", tmp_path / "big")
    proxy.add(Fault(effect=Effect.CUT_ANSWER, method="GET", times=1))
    faulty_store.get_file("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


def test_a_full_bucket_is_named_also_when_the_transfer_is_still_being_tidied_up(
    proxy: FaultProxy, make_store, tmp_path, monkeypatch
):
    """The transfer manager takes a failed transfer off its list in a thread of its own, sooner or later."""
    remove = TransferCoordinatorController.remove_transfer_coordinator

    def removed_late(*args: object) -> None:
        time.sleep(0.2)
        remove(*args)

    monkeypatch.setattr(TransferCoordinatorController, "remove_transfer_coordinator", removed_late)
    (tmp_path / "source").write_bytes(DATA)
    proxy.add(Fault(effect=Effect.ANSWER, method="PUT", status=507, code="InsufficientStorage"))
    with pytest.raises(CapacityError):
        make_store(RetryPolicy(deadline_s=10, max_attempts=2)).put_file("k", tmp_path / "source")
