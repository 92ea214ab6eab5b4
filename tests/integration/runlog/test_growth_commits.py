"""What a commit and a takeover cost does not grow with the run: counted, at steps that differ by a factor."""

import hashlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from millrace.errors import CorruptObjectError, UnavailableError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header, iter_chunks, pack_batch, unpack_batch
from millrace.runlog import RunLog, chain_hash, commit_batch
from millrace.runlog.catalogue import CHAIN_POINT
from millrace.runlog.records import frontier
from millrace.runlog.records.frontier import ChainPoint
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.run_record import load_origin
from millrace.runlog.recover import Committed, load_history, load_named
from millrace.storage.local import LocalStore
from millrace.telemetry import faults
from millrace.telemetry.faults import Action, Fault, Point

POINT_STEPS = 4


class Counting(LocalStore):
    """Counts calls, by method and first folder, and the names that listings look at."""

    def __init__(self, store: LocalStore, root: str) -> None:
        self.__dict__ = store.__dict__
        self._root_key = root
        self.calls: Counter[tuple[str, str]] = Counter()

    def __getattribute__(self, name: str):
        found = super().__getattribute__(name)
        if name not in ("get", "put", "create", "head", "list"):
            return found

        def call(key: str, *args, **options):
            self.calls[name, key.removeprefix(self._root_key).partition("/")[0]] += 1
            return found(key, *args, **options)

        return call


@pytest.fixture(autouse=True)
def looked_at(monkeypatch) -> list[int]:
    """Return how many names each listing looked at. There is a chain point after every few steps."""
    seen: list[int] = []
    scandir = os.scandir

    def count(directory):
        seen.append(len(os.listdir(directory)))
        return scandir(directory)

    monkeypatch.setattr(os, "scandir", count)
    monkeypatch.setattr(frontier, "POINT_STEPS", POINT_STEPS)
    return seen


@pytest.fixture
def store(log: RunLog) -> Counting:
    log.store = Counting(log.store, log.names.root)
    return log.store


class Writer:
    """Commits steps; each has a new policy and a new archive of events, which are announced."""

    def __init__(self, log: RunLog, epoch, make_batch) -> None:
        self.log, self.epoch, self.make_batch = log, epoch, make_batch
        self.known, self.chain, self.step = KnownObjects(), load_origin(log.store, log.names).chain_hash, 0

    def begin(self, committed: Committed) -> None:
        assert committed.last is not None
        self.known, self.chain, self.step = committed.known, committed.chain, committed.last.step + 1

    async def commit(self, steps: int) -> None:
        names = self.log.names
        for step in range(self.step, self.step + steps):
            for key in (names.policy_manifest(0, step), names.archived_events(f"1-{step}", f"1-{step}")):
                self.log.store.create(key, b"{}")
                self.known.announce(key.removeprefix(names.root))
            header, chunks = self.make_batch(step, chain=self.chain, num_tokens=4)
            stored = await commit_batch(self.log, self.epoch, header, chunks, b"archive", known=self.known)
            self.chain, self.step = chain_hash(self.chain, stored), step + 1


@pytest.fixture
async def writer(log: RunLog, store, make_batch) -> Writer:
    return Writer(log, await log.acquire_epoch("orchestrator", "o"), make_batch)


def size_of(value: object) -> int:
    """Return the bytes that a value and everything in it take."""
    inner: Iterator[object] = iter(())
    if isinstance(value, dict):
        inner = (each for pair in value.items() for each in pair)
    elif isinstance(value, list | set | tuple):
        inner = iter(value)
    elif hasattr(value, "__slots__"):
        inner = (getattr(value, name) for name in type(value).__slots__)
    return sys.getsizeof(value) + sum(map(size_of, inner))


def is_same(left: Committed, right: Committed, log: RunLog) -> bool:
    first, second = (load_named(log.store, log.names, each.known) for each in (left, right))
    return (left.last, left.chain, left.num_reopened, first) == (right.last, right.chain, right.num_reopened, second)


async def test_a_commit_asks_the_store_as_often_at_each_step_and_lists_nothing_that_grows(writer, store, looked_at):
    found = []
    for until in (9, 49):  # a step after a chain point, which the first one and the ones between are not
        await writer.commit(until - writer.step)
        store.calls.clear()
        looked_at.clear()
        await writer.commit(1)
        found.append((dict(store.calls), list(looked_at), size_of(vars(writer.known))))
    (calls, names, num_bytes), (later, later_names, later_bytes) = found
    assert (calls, names) == (later, later_names)
    assert later_bytes < 1.5 * num_bytes  # one that kept the 80 objects of the steps between had four times as much


async def test_a_takeover_reads_as_many_headers_at_each_step(writer, log, store):
    found = []
    for until in (POINT_STEPS + 1, 9 * POINT_STEPS + 1):
        await writer.commit(until - writer.step)
        store.calls.clear()
        committed = await load_history(log)
        assert committed.last is not None and committed.last.step == until - 1
        assert committed.chain == writer.chain
        found.append(dict(store.calls))
    assert found[0] == found[1]


async def test_a_successor_goes_on_as_its_predecessor_would_have(writer, log):
    await writer.commit(3 * POINT_STEPS - 1)
    writer.begin(await load_history(log))
    await writer.commit(POINT_STEPS)
    short = await load_history(log)
    assert load_named(log.store, log.names, short.known) == load_named(log.store, log.names, writer.known)
    for info in list(log.store.list(log.names.chain_points)):
        log.store.delete(info.key)
    whole = await load_history(log)
    assert (whole.last, whole.chain) == (short.last, short.chain)
    assert load_named(log.store, log.names, whole.known) == load_named(log.store, log.names, short.known)


async def test_a_run_that_began_without_chain_points_gets_them(writer, log, monkeypatch):
    monkeypatch.setattr(frontier, "POINT_STEPS", 1 << 20)
    await writer.commit(2 * POINT_STEPS + 1)
    monkeypatch.setattr(frontier, "POINT_STEPS", POINT_STEPS)
    writer.begin(await load_history(log))
    await writer.commit(1)
    points = [
        CHAIN_POINT.parse(info.key.removeprefix(log.names.root)) for info in log.store.list(log.names.chain_points)
    ]
    assert [int(place["step"]) for place in points] == [POINT_STEPS - 1, 2 * POINT_STEPS - 1]
    assert {ref.key for ref in (await load_history(log)).last.objects} >= {
        CHAIN_POINT.path(**place) for place in points
    }


def lie(data: bytes) -> bytes:
    """Return a point that says that a policy is named that is not."""
    point = ChainPoint.decode(data, where="it")
    highest = {**point.highest, "policies/": "policies/0009-00000000/manifest.json"}
    return ChainPoint(
        **{name: getattr(point, name) for name in point.__slots__ if name != "highest"}, highest=highest
    ).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: data.replace(b'"chain_hash":"', b'"chain_hash":"0', 1),
        lie,
    ],
)
async def test_what_no_header_proves_is_not_taken_from_a_point(writer, log, damage):
    await writer.commit(2 * POINT_STEPS + 2)
    right = await load_history(log)
    key = log.names.chain_point(2 * POINT_STEPS - 1)
    log.store.put(key, damage(log.store.get(key)))
    found = await load_history(log)
    assert is_same(found, right, log)
    writer.begin(found)
    await writer.commit(POINT_STEPS)  # the damaged one stays as it is, and is named as it was
    assert (await load_history(log)).chain == writer.chain


async def test_a_point_of_another_run_or_step_is_none(writer, log):
    await writer.commit(3 * POINT_STEPS + 1)
    right = await load_history(log)
    first, last = (log.store.get(log.names.chain_point(number * POINT_STEPS - 1)) for number in (1, 3))
    log.store.put(log.names.chain_point(3 * POINT_STEPS - 1), first)
    log.store.create(log.names.chain_point(99), last)
    assert is_same(await load_history(log), right, log)


async def test_a_writer_that_dies_behind_a_point_leaves_one_that_is_named_later(writer, log, tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "DIRECTORY", str(tmp_path))
    await writer.commit(2 * POINT_STEPS)
    fired = faults.arm(tmp_path, Fault(point=Point.ORCHESTRATOR_MID_COMMIT, action=Action.RAISE))
    with pytest.raises(UnavailableError):
        await writer.commit(1)
    key = log.names.chain_point(2 * POINT_STEPS - 1)
    assert fired.exists() and log.store.head(key) is not None
    committed = await load_history(log)
    assert committed.last is not None and committed.last.step == 2 * POINT_STEPS - 1
    writer.begin(committed)
    await writer.commit(1)
    last = (await load_history(log)).last
    named = {ref.key: ref.sha256 for ref in last.objects}
    assert named[key.removeprefix(log.names.root)] == hashlib.sha256(log.store.get(key)).digest()


async def test_a_commit_that_is_tried_again_makes_no_second_point(writer, log, tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "DIRECTORY", str(tmp_path))
    await writer.commit(POINT_STEPS - 1)
    faults.arm(tmp_path, Fault(point=Point.ORCHESTRATOR_AFTER_HEADER, action=Action.RAISE))
    with pytest.raises(UnavailableError):
        await writer.commit(1)
    await writer.commit(POINT_STEPS + 1)
    found = [key for key in load_named(log.store, log.names, writer.known).objects if key.startswith("chain_points/")]
    assert found == [CHAIN_POINT.path(step=POINT_STEPS - 1)]


@pytest.mark.parametrize("step", [2 * POINT_STEPS - 1, 2 * POINT_STEPS])
async def test_a_header_that_was_replaced_or_lost_behind_the_point_is_found(writer, log, step):
    await writer.commit(2 * POINT_STEPS + 3)
    key = log.names.batch_header(step)
    log.store.put(key, log.store.get(log.names.batch_header(step - 1)))
    with pytest.raises(CorruptObjectError) as replaced:
        await load_history(log)
    log.store.delete(key)
    with pytest.raises(CorruptObjectError) as lost:
        await load_history(log)
    assert {replaced.value.reason, lost.value.reason} == {"CHAIN_BROKEN"}


async def test_a_seal_is_written_without_chain_points_where_one_is_damaged(writer, log):
    await writer.commit(3 * POINT_STEPS)
    right = load_named(log.store, log.names, writer.known)
    log.store.put(log.names.chain_point(POINT_STEPS - 1), b"{}")
    assert load_named(log.store, log.names, writer.known) == right


async def test_a_large_batch_is_packed_beside_the_loop_and_never_there_as_a_whole(log, make_batch, monkeypatch):
    monkeypatch.setattr("millrace.runlog.commit.MAX_REDIS_BATCH_BYTES", 10)
    epoch = await log.acquire_epoch("orchestrator", "o")
    header, chunks = make_batch(0, num_tokens=400)
    samples = unpack_batch(header, dict(enumerate(chunks)))
    anew, stored, ahead = batch_pb2.BatchHeader(), set[str](), list[int]()
    anew.CopyFrom(header)
    put = log.store.put

    def noted(key: str, data: bytes) -> None:
        put(key, data)
        stored.add(key)

    def packed() -> Iterator[bytes]:
        for number, chunk in enumerate(iter_chunks(anew, samples * 8, target_chunk_bytes=700), 1):
            assert threading.current_thread() is not threading.main_thread()
            ahead.append(number - len(stored))
            yield chunk

    monkeypatch.setattr(log.store, "put", noted)
    done = decode_header(await commit_batch(log, epoch, anew, packed(), b""))
    assert len(ahead) == len(done.chunks) >= 30 and max(ahead) <= 6, "four are uploaded, one waits, one is packed"
    assert [log.store.get(chunk.key) for chunk in done.chunks] == pack_batch(
        header, samples * 8, target_chunk_bytes=700
    )


async def test_a_chunk_that_cannot_be_uploaded_ends_the_commit_and_the_packing(log, make_batch, monkeypatch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    header, chunks = make_batch(0)
    samples, taken = unpack_batch(header, dict(enumerate(chunks))), list[bytes]()
    anew = batch_pb2.BatchHeader()
    anew.CopyFrom(header)

    def fail(key: str, data: bytes) -> None:
        raise UnavailableError("no answer", reason="STORE_UNAVAILABLE")

    def packed() -> Iterator[bytes]:
        for chunk in iter_chunks(anew, samples * 50, target_chunk_bytes=700):
            taken.append(chunk)
            yield chunk

    with monkeypatch.context() as patch:
        patch.setattr(log.store, "put", fail)
        with pytest.raises(UnavailableError, match="no answer"):
            await commit_batch(log, epoch, anew, packed(), b"")
    assert len(taken) < 50 and log.store.head(log.names.batch_header(0)) is None
    assert await commit_batch(log, epoch, header, chunks, b"")
