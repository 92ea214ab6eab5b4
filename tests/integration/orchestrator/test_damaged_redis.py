"""Entries and keys in Redis that are not what was written never end a run: they are skipped, or the log is rebuilt."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import pytest

from millrace.backoff import Backoff
from millrace.client.runs import RunsClient
from millrace.errors import MillraceError
from millrace.internal.v1 import batch_pb2, policy_pb2, rollout_pb2
from millrace.orchestrator import manager
from millrace.orchestrator.drive import housekeeping
from millrace.rpc.channel import call
from millrace.runlog import Names, Stream, rebuild
from millrace.runlog.redis.entry import FORMAT_MAJOR
from millrace.v1 import event_pb2, run_pb2, run_service_pb2
from millrace_testing.lanes import by_default
from millrace_testing.orchestrator.runs import (
    bodies,
    create,
    get,
    headers_of,
    require_clean,
    resolutions,
    states,
    watch,
)
from millrace_testing.polling import until

JUNK = b"\xff\xff\xff"
LAST_ID = "18446744073709551615-18446744073709551615"
Damage = Callable[[object, str], Awaitable[None]]


def entry(data: bytes, **changed) -> dict:
    fields = {"v": str(FORMAT_MAJOR), "h": hashlib.sha256(data).hexdigest(), "d": data, "tp": "", **changed}
    return {name: value for name, value in fields.items() if value is not None}


ENTRIES = {
    "undecodable": entry(JUNK),
    "wrong hash": entry(b"data", h="0" * 64),
    "a field is missing": entry(b"data", h=None),
    "not UTF-8": entry(b"data", v=JUNK, h=JUNK, tp=JUNK),
    "another format": entry(b"data", v="99"),
    "no format": entry(b"data", v="-1"),
    "empty": {b"\xfe": b"\xfe"},
}


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run gets what would take many attackers; that damage is rebuilt ever more seldom has a test of its own."""
    monkeypatch.setattr(rebuild, "MAX_PROMPT", 1000)
    monkeypatch.setattr(manager, "MAX_GONE", 1000)
    monkeypatch.setattr(housekeeping, "ARCHIVE_S", 0.5)
    monkeypatch.setattr(housekeeping, "REPORT_DAMAGE", Backoff(0.1, 0.1))


class Attacked:
    """A run that is behind its first batches while its log is damaged, and then goes on."""

    def __init__(self, stack, run, trainer, env) -> None:
        self.stack, self.run, self.trainer, self.env = stack, run, trainer, env
        self.redis = stack.deps["redis"]
        self.names = Names(stack.prefix, run.uid)
        self.watching = asyncio.create_task(watch(stack, run, timeout_s=120.0))

    def key(self, stream: Stream) -> str:
        return self.names.stream(stream)

    async def generation(self) -> str:
        found = await self.redis.execute_command("HGET", self.names.meta, "generation")
        return (found or b"").decode(errors="replace")

    async def rebuilt(self, damage: Awaitable[object], what: str) -> None:
        """Do the damage, and wait until a new generation is in its place."""
        before = int(await self.generation())
        await damage

        async def is_new() -> bool:
            try:
                found = await self.generation()
            except Exception:  # noqa: BLE001 - a key of another type
                return False
            return found.isdigit() and before < int(found) < 1000

        await until(is_new, timeout_s=20.0, what=f"rebuilt: {what}")

    async def skipped(self, stream: Stream, fields: dict, what: str, *, id_: str = "*") -> None:
        """Add an entry, and wait until it is removed."""
        added = await self.redis.xadd(self.key(stream), fields, id=id_)

        async def is_gone() -> bool:
            return not await self.redis.xrange(self.key(stream), added, added)

        await until(is_gone, timeout_s=20.0, what=f"removed: {what}")

    async def finish(self) -> list:
        self.trainer.hold.set()
        events = await self.watching
        assert states(events)[-1] == "SUCCEEDED"
        headers = await headers_of(self.stack, self.run)
        assert headers[-1].kind == batch_pb2.BATCH_KIND_CLOSE and len(headers) == 5
        resolutions(headers)
        await require_clean(self.stack, self.run)
        return events


@pytest.fixture
async def attacked(stack) -> Attacked:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    trainer.hold.clear()
    run = await create(stack, max_steps=4)
    attacked = Attacked(stack, run, trainer, env)
    await until(lambda: len(trainer.headers) >= 1)
    return attacked


def warnings(events, reason: str) -> list[str]:
    return [warning.message for warning in bodies(events, "warning") if warning.reason == reason]


async def test_rollouts(attacked: Attacked) -> None:
    for what, fields in ENTRIES.items():
        await attacked.skipped(Stream.ROLLOUTS, fields, what)
    foreign = rollout_pb2.Rollout(run_uid="another").SerializeToString()
    await attacked.skipped(Stream.ROLLOUTS, entry(foreign), "a foreign rollout")
    key = attacked.key(Stream.ROLLOUTS)
    held = await attacked.redis.xlen(key)
    await attacked.rebuilt(_then_append(attacked, attacked.redis.xadd(key, entry(b"x"), id=LAST_ID)), "far ahead")
    assert await attacked.redis.xlen(key) >= held, "what stood before that entry is still there"
    await attacked.rebuilt(_then_append(attacked, _replace_by_text(attacked, Stream.ROLLOUTS)), "wrong type")
    events = await attacked.finish()
    told = " ".join(warnings(events, "ENTRY_DAMAGED"))
    assert "stream rollouts" in told and "sha256" in told and "lacks the field" in told and "format '-1'" in told
    causes = warnings(events, "LOG_REBUILT")
    assert len(causes) == 2 and all("stream rollouts" in cause or "a key" in cause for cause in causes)


async def _then_append(attacked: Attacked, damage: Awaitable[object]) -> None:
    """Do it while nothing comes in; the next rollout that comes meets it."""
    await damage
    attacked.trainer.hold.set()
    await asyncio.sleep(0)
    attacked.trainer.hold.clear()


async def _replace_by_text(attacked: Attacked, stream: Stream) -> None:
    await attacked.redis.delete(attacked.key(stream))
    await attacked.redis.set(attacked.key(stream), "text")


async def test_events(attacked: Attacked) -> None:
    for what, fields in ENTRIES.items():
        await attacked.skipped(Stream.EVENTS, fields, what, id_=f"{await attacked.generation()}-*")
    key = attacked.key(Stream.EVENTS)
    # First: what was not archived goes with the stream, the word of the rebuilds before included.
    await attacked.rebuilt(_replace_by_text(attacked, Stream.EVENTS), "wrong type")
    foreign = event_pb2.Event(writer="nobody", writer_sequence=1)
    foreign.warning.reason = "FOREIGN"
    await attacked.rebuilt(attacked.redis.xadd(key, entry(JUNK)), "an id of Redis' clock")
    await attacked.rebuilt(attacked.redis.xadd(key, entry(foreign.SerializeToString()), id="777-1"), "far ahead")
    await attacked.rebuilt(attacked.redis.xadd(key, entry(JUNK), id=LAST_ID), "the last id")
    events = await attacked.finish()
    assert all("stream events" in text for text in warnings(events, "ENTRY_DAMAGED"))
    assert len(warnings(events, "LOG_REBUILT")) == 4
    assert len(warnings(events, "FOREIGN")) == 1, "what can be read is an event"
    archived = list(attacked.stack.deps["store"].list(attacked.names.event_archive))
    assert archived and "777" not in archived[-1].key.rpartition("/")[2]


async def test_an_event_of_an_end_that_no_header_is_ends_no_watch(attacked: Attacked) -> None:
    """Told by somebody else at any time: neither the watchers of then nor those who replay it later stop there."""
    key, generation = attacked.key(Stream.EVENTS), await attacked.generation()
    for number, state in enumerate((run_pb2.RUN_STATE_CANCELLED, run_pb2.RUN_STATE_FAILED), start=1):
        end = event_pb2.Event(writer="nobody", writer_sequence=number)
        end.state_changed.new_state = state
        await attacked.redis.xadd(key, entry(end.SerializeToString()), id=f"{generation}-*")
    client = RunsClient(attacked.stack.runs, to="the orchestrator")
    following = asyncio.create_task(_follow(client, attacked.run.name))
    await asyncio.sleep(1.0)  # both have read it
    assert not attacked.watching.done() and not following.done()
    attacked.trainer.hold.set()
    for events in (await attacked.watching, await following, await watch(attacked.stack, attacked.run)):
        assert states(events)[-1] == "SUCCEEDED"
        assert not {"CANCELLED", "FAILED"} & set(states(events))


async def _follow(client: RunsClient, name: str) -> list:
    return [event async for event in client.watch(name)]


async def test_an_event_of_an_end_that_no_header_is_ends_nothing(attacked: Attacked) -> None:
    end = event_pb2.Event(writer="nobody", writer_sequence=1)
    end.state_changed.new_state = run_pb2.RUN_STATE_SUCCEEDED
    await attacked.redis.xadd(
        attacked.key(Stream.EVENTS), entry(end.SerializeToString()), id=f"{await attacked.generation()}-*"
    )
    stack = attacked.stack
    await stack.kill_orchestrator()
    await stack.start_orchestrator(int(stack.address.rpartition(":")[2]))
    attacked.trainer.hold.set()

    async def has_ended() -> bool:
        return bool(await headers_of(stack, attacked.run)) and (
            (await headers_of(stack, attacked.run))[-1].kind == batch_pb2.BATCH_KIND_CLOSE
        )

    await until(has_ended, timeout_s=30.0, what="it went on to its end")
    attacked.watching.cancel()


async def test_events_with_numbers_to_which_nothing_was_counted(attacked: Attacked) -> None:
    late = event_pb2.Event(writer="nobody", writer_sequence=1)
    late.warning.reason = "FOREIGN"
    late.time.seconds = 1 << 62
    step = event_pb2.Event(writer="nobody", writer_sequence=2)
    step.step_completed.step = step.step_completed.num_rollouts = step.step_completed.num_tokens = (1 << 63) - 1
    published = event_pb2.Event(writer="nobody", writer_sequence=3)
    published.policy_published.version = (1 << 63) - 1
    generation = await attacked.generation()
    await attacked.skipped(Stream.EVENTS, entry(late.SerializeToString()), "no valid time", id_=f"{generation}-*")
    for event in (step, published):
        await attacked.redis.xadd(attacked.key(Stream.EVENTS), entry(event.SerializeToString()), id=f"{generation}-*")
    stack = attacked.stack
    shown = await get(stack, attacked.run)
    assert shown.state == run_pb2.RUN_STATE_RUNNING, shown.error
    attacked.trainer.hold.set()
    events = await attacked.watching
    assert states(events)[-1] == "SUCCEEDED" and "valid time" in " ".join(warnings(events, "ENTRY_DAMAGED"))


BATCHES = {
    "undecodable": ("50-1", JUNK),
    "foreign": (
        "50-1",
        batch_pb2.BatchHeader(run_uid="x", kind=batch_pb2.BATCH_KIND_TRAIN, step=50).SerializeToString(),
    ),
    "the last id": (LAST_ID, JUNK),
    "wrong type": None,
}


@pytest.mark.parametrize("what", by_default(BATCHES, {"undecodable", "wrong type"}))
async def test_batches(attacked: Attacked, what: str) -> None:
    damage = BATCHES[what]
    if damage is None:
        await _replace_by_text(attacked, Stream.BATCHES)
    else:
        await attacked.redis.xadd(attacked.key(Stream.BATCHES), entry(damage[1]), id=damage[0])
    events = await attacked.finish()
    assert any("stream batches" in cause or "a key" in cause for cause in warnings(events, "LOG_REBUILT"))


async def test_policies(attacked: Attacked) -> None:
    key = attacked.key(Stream.POLICIES)
    names = attacked.names
    foreign = policy_pb2.PolicyEntry(version=50, manifest_key=names.policy_manifest(0, 50), digest="f" * 64)
    another = policy_pb2.PolicyEntry(version=50, manifest_key=names.policy_manifest(0, 0), digest="f" * 64)
    more = {"no such version": entry(foreign.SerializeToString()), "of another": entry(another.SerializeToString())}
    for what, fields in (ENTRIES | more).items():
        await attacked.rebuilt(attacked.redis.xadd(key, fields, id="50-1"), what)
    await attacked.rebuilt(attacked.redis.xadd(key, entry(JUNK), id=LAST_ID), "the last id")
    await attacked.rebuilt(_replace_by_text(attacked, Stream.POLICIES), "wrong type")
    events = await attacked.finish()
    assert len(warnings(events, "LOG_REBUILT")) == len(ENTRIES) + 4
    assert all("stream policies" in cause or "a key" in cause for cause in warnings(events, "LOG_REBUILT"))


@pytest.mark.parametrize(
    "fields",
    [
        {"generation": JUNK},
        {"run_hash": "f" * 64, "generation": "999"},
        *(
            pytest.param(fields, marks=pytest.mark.long)
            for fields in (
                {"generation": "x"},
                {"generation": "999"},
                {"generation": "9" * 60},
                {"generation": ""},
                {"format": "x", "generation": "x"},
            )
        ),
    ],
    ids=str,
)
async def test_generations(attacked: Attacked, fields) -> None:
    await attacked.rebuilt(attacked.redis.hset(attacked.names.meta, mapping=fields), str(fields))
    assert warnings(await attacked.finish(), "LOG_REBUILT")


FIELDS = {"epoch:orchestrator": "x", "epoch:trainer": "9999", "base:batches": "x", "seq:": "x"}


@pytest.mark.parametrize("field", by_default(FIELDS, {"epoch:trainer"}))
async def test_fields_of_meta(attacked: Attacked, field: str) -> None:
    meta = attacked.names.meta
    for name in await attacked.redis.hkeys(meta):
        if name.decode().startswith(field):
            await attacked.redis.hset(meta, name, FIELDS[field])
    events = await attacked.finish()
    causes = warnings(events, "LOG_REBUILT")
    assert field == "base:batches" or any(f"field {field}" in cause for cause in causes), causes


async def test_meta_of_another_type(attacked: Attacked) -> None:
    await attacked.rebuilt(_replace_meta(attacked), "wrong type")
    assert warnings(await attacked.finish(), "LOG_REBUILT")


async def _replace_meta(attacked: Attacked) -> None:
    await attacked.redis.delete(attacked.names.meta)
    await attacked.redis.set(attacked.names.meta, "text")


@pytest.mark.long
async def test_damage_that_comes_again_is_rebuilt_ever_more_seldom_and_why_names_it(attacked, monkeypatch) -> None:
    monkeypatch.setattr(rebuild, "MAX_PROMPT", 3)
    monkeypatch.setattr(rebuild, "BACKOFF", Backoff(30.0, 60.0))  # what is looked at below takes 20 s at the most
    key = attacked.key(Stream.POLICIES)
    for _ in range(3):
        await attacked.rebuilt(attacked.redis.xadd(key, entry(JUNK), id="50-1"), "promptly")
    await until(lambda: _is_running(attacked))
    await attacked.redis.xadd(key, entry(JUNK), id="50-1")

    async def summary() -> str:
        request = run_service_pb2.ExplainRunRequest(name=attacked.run.name)
        try:
            return (await call(attacked.stack.runs.ExplainRun, request)).summary
        except MillraceError as error:
            return str(error)

    async def is_named() -> bool:
        return "stream policies" in await summary()

    await until(is_named, timeout_s=12.0, what="why names the stream")
    stored = len(list(attacked.stack.deps["store"].list(attacked.names.epochs("log"))))
    for _ in range(16):
        said = await summary()
        assert "stream policies" in said and "50-1" in said and "inference" not in said, said
        await asyncio.sleep(0.5)
    now = len(list(attacked.stack.deps["store"].list(attacked.names.epochs("log"))))
    assert stored == now, "it is not rebuilt again before its time"
    await until(lambda: _is_running(attacked), timeout_s=60.0, what="it is tried again")
    await attacked.finish()


async def _is_running(attacked: Attacked) -> bool:
    try:
        run = await get(attacked.stack, attacked.run)
    except MillraceError:  # while its log waits to be rebuilt
        return False
    return run.state == run_pb2.RUN_STATE_RUNNING
