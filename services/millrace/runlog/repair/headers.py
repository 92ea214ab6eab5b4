"""The headers of a run, from the last to the first: each names the chain hash behind the one before it."""

import contextlib
from collections import defaultdict

from millrace.decoding import decode_message
from millrace.errors import CorruptObjectError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog.events.archive import decode_archive
from millrace.runlog.records.frontier import chain_hash
from millrace.runlog.records.revisions import list_headers
from millrace.runlog.records.sealed import Seal
from millrace.runlog.repair.objects import Judge, Workbench
from millrace.v1 import event_pb2

_MAX_GAP = 10_000
"""Most headers in a row that can be missing; what stands behind such a gap is foreign."""
Position = tuple[int, int]
"""(step, revision)."""
Header = tuple[bytes, batch_pb2.BatchHeader]


def repair_headers(bench: Workbench) -> dict[Position, Header]:
    """Examine every header; returns those that are right, or would be after the repair, in order.

    Only the store says which one is right. What stands in Redis, its events included, is a copy: it may be foreign.
    """
    told, found = _told_chains(bench), dict[Position, Header]()
    previous: bytes | None = None  # what the header behind this one says of the chain behind this one
    for at in reversed(_positions(bench)):
        prover, targets = f"header {_name(found, at)} behind it", {previous} if previous is not None else set[bytes]()
        if not targets:
            prover, targets = "the chain hash that archived events or a seal name", told[at[0]]
        held = bench.redis.headers.get(at) if bench.redis is not None else None
        data = bench.examine(
            bench.names.batch_header(*at),
            _judge(bench, at, targets),
            prover=prover if targets else "",
            candidates=[("Redis", held)],
        )
        if data is None:
            previous = None
            continue
        header = decode_header(data)
        found[at], previous = (data, header), header.previous_chain_hash
    return dict(sorted(found.items()))


def _judge(bench: Workbench, at: Position, targets: set[bytes]) -> Judge:
    def judge(data: bytes) -> str:
        try:
            header = decode_header(data)
        except CorruptObjectError as error:
            return error.message
        if (header.run_uid, header.step, header.revision) != (bench.names.uid, *at):
            return f"it is header {header.step}, revision {header.revision}, of run {header.run_uid!r}"
        if len(header.previous_chain_hash) != 32:
            return "it names no chain hash"
        if targets and chain_hash(header.previous_chain_hash, data) not in targets:
            return "it does not give the chain hash that others name"
        return ""

    return judge


def _positions(bench: Workbench) -> list[Position]:
    """Every place where a header is or has to be, ascending."""
    found = set(list_headers(bench.store, bench.names))
    if bench.redis is not None:
        found |= set(bench.redis.headers)
    if bench.backup is not None:
        found |= set(list_headers(bench.backup, bench.names))
    positions: list[Position] = []
    for step, revision in sorted(found):
        last = positions[-1] if positions else (step - 1, 0)
        if step - last[0] > _MAX_GAP or revision > _MAX_GAP:
            break  # so far ahead is nothing of this run
        positions += [(between, 0) for between in range(last[0] + 1, step)]
        positions += [(step, number) for number in range(last[1] + 1 if last[0] == step else 0, revision + 1)]
    return positions


def _told_chains(bench: Workbench) -> defaultdict[int, set[bytes]]:
    """Chain hashes behind steps, as archived events and seals tell of them."""
    told: defaultdict[int, set[bytes]] = defaultdict(set)
    payloads: list[bytes] = []
    for info in bench.store.list(bench.names.event_archive):
        try:
            payloads += [entry.d for entry in decode_archive(bench.read(info.key) or b"", info.key)]
        except CorruptObjectError:
            continue  # it is looked at by itself
    closing: set[bytes] = set()
    for data in payloads:
        try:
            event = decode_message(event_pb2.Event, data, what="event", reason="EVENT_CORRUPT")
        except CorruptObjectError:
            continue
        with contextlib.suppress(ValueError):  # no hash: a foreign event
            if event.batch_committed.chain_hash:
                told[event.batch_committed.step].add(bytes.fromhex(event.batch_committed.chain_hash))
            if event.state_changed.chain_hash:
                closing.add(bytes.fromhex(event.state_changed.chain_hash))
    for info in bench.store.list(bench.names.seals):
        try:
            closing.add(bytes.fromhex(Seal.decode(bench.read(info.key) or b"", where=info.key).chain_hash))
        except (CorruptObjectError, ValueError):
            continue
    last = max((step for step, _ in list_headers(bench.store, bench.names)), default=-1)
    for step in (last, last + 1):  # the closing header has no batch_committed
        if closing and step not in told:
            told[step] = set(closing)
    return told


def _name(found: dict[Position, Header], at: Position) -> str:
    behind = min((other for other in found if other > at), default=at)
    return f"{behind[0]}.r{behind[1]}" if behind[1] else str(behind[0])
