"""What a rebuilt log of a run holds at first: meta and events, from the store and from what Redis still has."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import LogGoneError
from millrace.runlog.events.archive import load_archived_events, read_page
from millrace.runlog.events.reader import MAX_SEQUENCE, readable_event
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.epochs import GENERATION_ROLE, latest_epoch
from millrace.runlog.records.listing import list_checkpoints, list_policies
from millrace.runlog.records.origin import RunOrigin, parse_origin
from millrace.runlog.redis.entry import FORMAT_MAJOR, Entry, id_order
from millrace.runlog.redis.log import RunLog, parse_run_hash
from millrace.storage import ObjectStore
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

REBUILDER = "log"
"""Name of the writer of the event that a rebuild leaves."""
LOST = "Redis had lost the log of the run"
"""Why a log is rebuilt, for people, where nothing else is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Contents of a rebuilt log."""

    meta: dict[str, str | int]
    """Fields of meta but generation and format."""
    events: Sequence[Entry]
    """The events in their order."""
    summary: str
    """What was restored, for people."""


def load_restored(store: ObjectStore, names: Names) -> Restored:
    """What the store has for a rebuild (blocking)."""
    run_json = store.get(names.run_json, max_bytes=MAX_JSON_BYTES)
    origin = parse_origin(run_json, where=store.uri(names.run_json))
    step = _first_batch(store, names, origin)
    version = _first_policy(store, names, step)
    epochs = {role: latest_epoch(store, names, role) for role in _roles(store, names)}
    meta: dict[str, str | int] = {"run_hash": parse_run_hash(run_json)}
    meta |= {f"base:{Stream.BATCHES}": step, f"base:{Stream.POLICIES}": version}
    meta |= {f"epoch:{role}": number for role, number in epochs.items()}
    events = load_archived_events(store, names)
    summary = (
        f"restored {len(events)} archived events, epochs {json.dumps(epochs, sort_keys=True)}; "
        f"batches come again from step {step} on, policies from version {version}"
    )
    return Restored(meta=meta, events=events, summary=summary)


async def read_events(log: RunLog) -> list[Entry]:
    """The events that Redis still has, whatever generation it says it is of; none if the key is no stream."""
    found: list[Entry] = []
    try:
        while page := await read_page(log, f"({found[-1].id}" if found else "-"):
            found += page
    except LogGoneError as error:
        logger.warning("events in Redis cannot be read", extra={"uid": log.uid, "error": error.message})
        return []
    return found


def merge_events(
    restored: Restored, held: Sequence[Entry], *, generation: int, now_ns: int, why: str = LOST
) -> Restored:
    """Add what only Redis holds, under ids of the new generation, then the event that tells of the rebuild.

    What is damaged is left out, and so is what the store has under ids of generations that are still to come. `why`
    says why the log is rebuilt.

    Their old ids may be those of other events that the store has. Their bytes stay, and so do their numbers unless an
    archived event of the writer has that number (of a process that died, whose successor did not know it).
    """
    hashes = {entry.h for entry in restored.events}
    events, newest = _readable(restored, before=generation)
    num_damaged = len(restored.events) - len(events)
    extra: list[Entry] = []
    for entry in held:
        if entry.damage or entry.h not in hashes:
            event = readable_event(entry)
            if event is None:
                num_damaged += 1
                continue
            event.ClearField("cursor")
            known, _ = newest.get(event.writer, (0, ""))
            if event.writer_sequence <= known:
                event.writer_sequence = known + 1
                entry = _entry(event)
            _note(newest, event, entry.h)
            extra.append(entry)
    summary = restored.summary + (f"; kept {len(extra)} events that only Redis had" if extra else "")
    summary += f"; left out {num_damaged} damaged entries" if num_damaged else ""
    event = event_pb2.Event(writer=REBUILDER, writer_sequence=newest.get(REBUILDER, (0, ""))[0] + 1)
    event.time.FromNanoseconds(now_ns)
    event.warning.reason = "LOG_REBUILT"
    event.warning.message = (
        f"{why}; generation {generation} {summary}; events of the last seconds that no living process holds are "
        "lost, nothing else is"
    )
    extra.append(_entry(event))
    _note(newest, event, extra[-1].h)
    events += [replace(entry, id=f"{generation}-{number}") for number, entry in enumerate(extra)]
    return Restored(meta=restored.meta | _sequences(newest), events=events, summary=summary)


def as_sealed(restored: Restored) -> Restored:
    """Return what a sealed run has: its archived events, and nothing that tells of the rebuild."""
    events, newest = _readable(restored, before=None)
    return Restored(meta=restored.meta | _sequences(newest), events=events, summary=restored.summary)


def _readable(restored: Restored, *, before: int | None) -> tuple[list[Entry], dict[str, tuple[int, str]]]:
    """The archived events below a generation, and number and hash of the newest of each writer, as meta has them."""
    newest: dict[str, tuple[int, str]] = {}
    events: list[Entry] = []
    for entry in restored.events:
        event = readable_event(entry)
        if event is not None and (before is None or id_order(entry.id) < (before, 0)):
            events.append(entry)
            _note(newest, event, entry.h)
    return events, newest


def _sequences(newest: dict[str, tuple[int, str]]) -> dict[str, str | int]:
    return {f"seq:{writer}": f"{number} {entry_hash}" for writer, (number, entry_hash) in newest.items()}


def _note(newest: dict[str, tuple[int, str]], event: event_pb2.Event, entry_hash: str) -> None:
    known, _ = newest.get(event.writer, (0, ""))
    if known < event.writer_sequence <= max(MAX_SEQUENCE // 2, known + 1):  # nobody has counted further
        newest[event.writer] = event.writer_sequence, entry_hash


def _entry(event: event_pb2.Event) -> Entry:
    data = event.SerializeToString(deterministic=True)
    return Entry(id="", v=FORMAT_MAJOR, h=hashlib.sha256(data).hexdigest(), d=data, tp="")


def _roles(store: ObjectStore, names: Names) -> list[str]:
    """Every role that ever had an epoch but the log's own."""
    found = (prefix.removeprefix(names.all_epochs).rstrip("/") for prefix in store.list_prefixes(names.all_epochs))
    return [role for role in found if role != GENERATION_ROLE]


def _first_batch(store: ObjectStore, names: Names, origin: RunOrigin) -> int:
    """The step from which batches are wanted in Redis: that of the oldest checkpoint that the headers reach."""
    step = next((step for step in list_checkpoints(store, names) if step >= origin.base_step), 0)
    is_backed = step > 0 and store.head(names.batch_header(step - 1)) is not None
    return step if is_backed else origin.base_step


def _first_policy(store: ObjectStore, names: Names, first: int) -> int:
    """The lowest version from `first` on from which every published version up to the newest is in the store."""
    found = list_policies(store, names)
    lowest = None
    for version in sorted({version for version, _ in found if version >= first}, reverse=True):
        if any(store.head(names.policy_manifest(lineage, each)) for each, lineage in found if each == version):
            if lowest is not None and version != lowest - 1:
                break
            lowest = version
        elif lowest is not None:
            break  # a hole: what is below was collected
    return first if lowest is None else lowest
