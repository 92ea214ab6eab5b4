import asyncio
import hashlib
from dataclasses import dataclass, field, replace

from millrace.orchestrator.play import book
from millrace.orchestrator.play.book import RolloutStream
from millrace.rollouts.types import Rollout
from millrace.rollouts.wire import encode_rollout
from millrace.runlog import Entry
from millrace_testing.orchestrator.builders import make_rollout
from millrace_testing.polling import until


@dataclass
class ListLog:
    """A log whose rollout stream is a list; `gate` holds blocking reads back after they have looked."""

    entries: list[Entry] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, rollout: Rollout, *, at: int) -> None:
        data = encode_rollout(rollout)
        self.entries.append(Entry(id=f"{at}-0", v=1, h=hashlib.sha256(data).hexdigest(), d=data, tp=""))

    async def read(self, stream: str, *, after: str, count: int, block_s: float) -> list[Entry]:
        found = [entry for entry in self.entries if int(entry.id.split("-")[0]) > int(after.split("-")[0])]
        await asyncio.sleep(0)
        if block_s > 0:
            await self.gate.wait()
        return found[:count]


def reading(log: ListLog) -> tuple[RolloutStream, list[Rollout]]:
    taken: list[Rollout] = []
    return RolloutStream(log, take=taken.append), taken  # pyright: ignore[reportArgumentType]


async def test_catching_up_beside_a_blocked_read_takes_every_entry_once() -> None:
    log = ListLog()
    stream, taken = reading(log)
    log.append(make_rollout(0, 0), at=5)
    following = asyncio.create_task(stream.follow())
    await asyncio.sleep(0)  # it has asked Redis
    await stream.catch_up()
    log.gate.set()
    log.append(make_rollout(0, 1), at=6)
    await until(lambda: len(taken) >= 2)
    following.cancel()
    assert [(rollout.member, rollout.entry_id) for rollout in taken] == [(0, "5-0"), (1, "6-0")]
    assert stream.newest == "6-0"


async def test_after_a_restart_only_what_is_new_is_taken_under_whatever_id() -> None:
    log = ListLog()
    stream, taken = reading(log)
    for member in range(3):
        log.append(make_rollout(0, member), at=10 + member)
    await stream.catch_up()
    del log.entries[1:]  # Redis lost its tail; an env-server appends it again, and one more
    log.append(make_rollout(0, 1), at=20)
    log.append(make_rollout(0, 2), at=21)
    log.append(make_rollout(0, 3), at=22)
    stream.rewind()
    await stream.catch_up()
    assert [(rollout.member, rollout.entry_id) for rollout in taken] == [
        (0, "10-0"),
        (1, "11-0"),
        (2, "12-0"),
        (3, "22-0"),
    ]


async def test_of_what_was_taken_the_newest_entries_are_remembered(monkeypatch) -> None:
    """What is remembered does not grow with the run."""
    monkeypatch.setattr(book, "MAX_SEEN", 4)
    log = ListLog()
    stream, taken = reading(log)
    for ordinal in range(20):
        log.append(make_rollout(ordinal, 0), at=10 + ordinal)
    await stream.catch_up()
    del log.entries[:-5]
    stream.rewind()
    await stream.catch_up()
    assert [rollout.ordinal for rollout in taken] == [*range(20), 15], "the four that are remembered are known"


async def test_a_read_from_before_the_restart_does_not_hide_what_the_new_copy_begins_with() -> None:
    log = ListLog()
    stream, taken = reading(log)
    log.append(make_rollout(0, 0), at=10)
    await stream.catch_up()
    log.append(make_rollout(0, 1), at=30)
    following = asyncio.create_task(stream.follow())
    await asyncio.sleep(0)  # it has found entry 30 after its old position
    log.append(replace(make_rollout(0, 2), reward=1.0), at=20)
    log.entries.sort(key=lambda entry: int(entry.id.split("-")[0]))
    stream.rewind()
    log.gate.set()
    await until(lambda: len(taken) >= 3)
    following.cancel()
    assert [rollout.entry_id for rollout in taken] == ["10-0", "20-0", "30-0"]


async def test_an_entry_that_does_not_decode_is_passed_over() -> None:
    log = ListLog()
    stream, taken = reading(log)
    log.entries.append(Entry(id="5-0", v=1, h=hashlib.sha256(b"\xff").hexdigest(), d=b"\xff", tp=""))
    log.append(make_rollout(0, 0), at=6)
    await stream.catch_up()
    assert [rollout.entry_id for rollout in taken] == ["6-0"]
