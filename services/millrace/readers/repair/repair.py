"""`run repair`: what of a run is damaged or missing, from what it can be restored, and its restoration.

Only bytes that another object proves are restored: headers by the chain, what headers and seals name by its sha256, the
objects of policies and checkpoints by their manifests, a record of a reopening by the header that it names. What proves
is looked at before what it proves. See `objects` for how bytes get to their place.
"""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from millrace.decoding import decode_message, decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, NotFoundError
from millrace.readers.repair.objects import (
    MAX_GAP,
    Header,
    Judge,
    Position,
    RedisCopy,
    Repair,
    Workbench,
    archived_events,
    decodes,
    of_hash,
    repair_headers,
)
from millrace.runlog import catalogue
from millrace.runlog.catalogue import BASE_MANIFEST, CHECKPOINT_MANIFEST, EVENT_ARCHIVE, GENERATION, SEAL, TOKEN_LOG
from millrace.runlog.event_archive import decode_archive, encode_archive
from millrace.runlog.names import Deployment, Names
from millrace.runlog.records.known import manifest_digest
from millrace.runlog.records.numbered import GENERATION_ROLE
from millrace.runlog.records.retirement import newest_retirement
from millrace.runlog.records.revisions import Reopening, parse_reopening
from millrace.runlog.records.run_record import RunRecord, list_checkpoints, list_objects, list_policies, parse_origin
from millrace.runlog.records.sealed import Seal
from millrace.runlog.redis.entry import id_order
from millrace.runlog.redis.log import RunLog
from millrace.storage import ObjectStore
from millrace.storage.base import find_newest, newest_revision, revision_key, revision_of
from millrace.v1 import event_pb2

_EMPTY = hashlib.sha256(b"").hexdigest()


async def repair_run(
    log: RunLog | None,
    store: ObjectStore,
    names: Names,
    *,
    backup: ObjectStore | None = None,
    is_applied: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Repair]:
    """Examine every object of a run, and return those that are not right; restore what can be restored if `is_applied`.

    Every byte of the run is read. `log` is the copy in Redis, None without; `backup` a replica of the bucket, None
    without. `on_progress` is called from another thread with the key that is examined.
    """
    redis = None if log is None else await RedisCopy.load(log)
    bench = Workbench(
        store=store, names=names, backup=backup, redis=redis, is_applied=is_applied, on_progress=on_progress
    )
    await asyncio.to_thread(_repair, bench)
    return bench.repairs


def _repair(bench: Workbench) -> None:
    """Examine every object of the run, what proves before what it proves (blocking)."""
    headers = repair_headers(bench)
    run_json = _repair_run_json(bench, headers)
    if run_json is not None:
        _repair_names(bench, run_json)
    _repair_reopenings(bench, headers)
    with contextlib.suppress(CorruptObjectError):  # reported with the numbered objects
        bench.retired = newest_retirement(bench.store, bench.names)
    pins = _pins(bench, headers)
    kept_from = next(list_checkpoints(bench.store, bench.names), 0)  # batches since then are needed
    for at, (_, header) in headers.items():
        for chunk in header.chunks:
            sha256 = chunk.sha256.hex()
            held = None if bench.redis is None else bench.redis.by_hash(sha256)
            bench.examine(
                chunk.key,
                of_hash(sha256),
                prover=f"header {at[0]}",
                candidates=[("Redis", held)],
                without="" if header.step >= kept_from else f"checkpoint {kept_from} has what it taught",
            )
        if header.rollouts_key:
            bench.examine(header.rollouts_key, of_hash(header.rollouts_sha256.hex()), prover=f"header {at[0]}")
    for key, (sha256, prover) in pins.items():
        _repair_pinned(bench, key, sha256, prover)
    _repair_archives(bench, pins)
    _repair_numbered(bench)
    _repair_generations(bench)
    _repair_token_logs(bench)
    _repair_checkpoints(bench, headers)
    _repair_policies(bench, headers)
    bench.note_retired()


def _repair_run_json(bench: Workbench, headers: dict[Position, Header]) -> bytes | None:
    """Examine `run.json`, with whose hash the chain begins, and return its right bytes; None if there are none.

    `headers` are the run's right headers.
    """
    names = bench.names
    first = next(iter(headers.items()), None)

    def judge(data: bytes) -> str:
        """Return in words why the bytes are not the run's record; empty if they are, as far as is known."""
        try:
            record = RunRecord.parse(data, where="it", needs=["name"])
            if record.uid not in ("", names.uid):
                return "it is another run's"
            origin = parse_origin(data, where="it")
            _index_objects(record, names)
        except (CorruptObjectError, InvalidSpecError) as error:
            return error.message
        is_first = first is not None and first[0] == (origin.base_step, 0)
        if first is not None and is_first and origin.chain_hash != first[1][1].previous_chain_hash:
            return f"the chain of header {first[0][0]} does not begin with it"
        return ""

    prover = f"the chain, which begins with it (header {first[0][0]})" if first is not None else ""
    return bench.examine(names.run_json, judge, prover=prover)


def _repair_names(bench: Workbench, run_json: bytes) -> None:
    """Examine the objects of the index that lead from the run's name and request to its uid."""
    record = RunRecord.parse(run_json, where=bench.names.run_json, needs=["name"])
    uid, (name, request) = bench.names.uid.encode(), _index_objects(record, bench.names)

    def judge(data: bytes) -> str:
        return "" if data == uid else "it names another run, or none"

    made = [("run.json", uid)]
    bench.examine(name, judge, prover="run.json", candidates=made)
    if request:  # made up, and without an object, where the caller named none
        bench.examine(request, judge, prover="run.json", candidates=made, may_be_gone=True)


def _index_objects(record: RunRecord, names: Names) -> tuple[str, str]:
    """Return the keys of the objects that lead to a run by its name and its request ("" without one).

    InvalidSpecError if its name or request is not legal.
    """
    deployment, request = Deployment(names.prefix), record.request_id
    return deployment.name_object(record.name), deployment.request_object(request) if request else ""


def _repair_reopenings(bench: Workbench, headers: dict[Position, Header]) -> None:
    """Examine the records of the closing headers that have a successor: which of them count follows from the chain."""
    number = 0
    for (step, revision), (data, _) in headers.items():
        if (step, revision + 1) not in headers:
            continue
        number += 1
        sha256 = hashlib.sha256(data).hexdigest()

        def judge(record: bytes, sha256: str = sha256, step: int = step, revision: int = revision) -> str:
            """Return in words why the bytes are not the record of this closing header; empty if they are."""
            try:
                found = parse_reopening(record, where="it")
            except CorruptObjectError as error:
                return error.message
            wanted = (step, revision, sha256)
            return "" if (found.step, found.revision, found.closing_sha256) == wanted else "it names another header"

        made = Reopening(
            step=step, revision=revision, closing_sha256=sha256, epoch=0, owner="made anew by run repair", time=""
        )
        bench.examine(
            bench.names.reopened(number),
            judge,
            prover=f"revision {revision + 1} of header {step}, which continues it",
            # After the backup's record, which says who reopened the run, and when.
            fallback=("the headers", made.encode()),
        )


def _pins(bench: Workbench, headers: dict[Position, Header]) -> dict[str, tuple[str, str]]:
    """Return sha256 (hex) by key, and who names it, for all that headers and seals name; the seals are examined."""
    pins: dict[str, tuple[str, str]] = {}
    for info in list(bench.store.list(bench.names.seals)):
        data = bench.examine(info.key, decodes(SEAL), prover="")
        for key, sha256 in Seal.decode(data, where=info.key).objects.items() if data is not None else ():
            pins[bench.names.root + key] = sha256, info.key.removeprefix(bench.names.root)
    for (step, _), (_, header) in headers.items():
        for item in header.objects:
            pins[bench.names.root + item.key] = item.sha256.hex(), f"header {step}"
    pins.pop(bench.names.run_json, None)  # the chain proves it
    return pins


def _repair_pinned(bench: Workbench, key: str, sha256: str, prover: str) -> None:
    """Examine an object that a header or seal names with this sha256; `key` is whole, `prover` says who names it."""
    names = bench.names
    if key.startswith(names.reopenings):
        return
    folder = key.rpartition("/")[0] + "/"
    is_large = bench.is_ours(key) and key.startswith((names.policies, names.checkpoints))
    # Retention removes a policy or checkpoint whole: nothing of its folder is left then.
    is_retired = is_large and not any(bench.store.list(folder))
    candidates = []
    if key.startswith(names.event_archive):
        candidates = [("Redis", _archive_from_redis(bench, key))]
    elif key.startswith(names.generations):
        candidates = [("its name", b"")]
    without = _successor_of(bench, key) if is_large and key.endswith("/manifest.json") else ""
    bench.examine(key, of_hash(sha256), prover=prover, candidates=candidates, may_be_gone=is_retired, without=without)


def _successor_of(bench: Workbench, key: str) -> str:
    """Return in words which newer revision replaces a manifest; empty if none that can be read does."""
    newest = find_newest(bench.store, key)
    if newest is None or newest == key or _json_judge("manifest")(bench.read(newest) or b""):
        return ""
    return f"{newest.removeprefix(bench.names.root)} was written in its place"


def _archive_from_redis(bench: Workbench, key: str) -> bytes | None:
    """Return the bytes of an archive of events made anew of the entries in Redis; None unless Redis has all of them."""
    ids = EVENT_ARCHIVE.parse(key.removeprefix(bench.names.root))
    if bench.redis is None or ids is None:
        return None
    first, last = (int(ids["first"]), int(ids["first_place"])), (int(ids["last"]), int(ids["last_place"]))
    entries = [entry for entry in bench.redis.events if first <= id_order(entry.id) <= last]
    if not entries or (id_order(entries[0].id), id_order(entries[-1].id)) != (first, last):
        return None
    if first[0] == last[0] and len(entries) != last[1] - first[1] + 1:
        return None  # ids of a generation are without gaps
    return encode_archive(entries)


def _repair_archives(bench: Workbench, pins: dict[str, tuple[str, str]]) -> None:
    """Examine the archives of events that are not in `pins`, as no header or seal names them yet.

    Redis proves each of their events.
    """
    for info in list(bench.store.list(bench.names.event_archive)):
        if info.key in pins:
            continue

        def judge(data: bytes, key: str = info.key) -> str:
            """Return why the archive's events cannot be decoded; empty if all can."""
            try:
                for entry in decode_archive(data, bench.store.uri(key)):
                    decode_message(event_pb2.Event, entry.d, what=f"event {entry.id}", reason="EVENT_CORRUPT")
            except CorruptObjectError as error:
                return error.message
            return ""

        made = _archive_from_redis(bench, info.key)
        prover = "the hashes of its events in Redis" if made is not None else ""
        bench.examine(
            info.key,
            judge,
            prover=prover,
            proof=lambda data, made=made: "" if data == made else "it is not what Redis has",
            candidates=[("Redis", made)],
        )


def _repair_numbered(bench: Workbench) -> None:
    """Examine what is numbered without a gap, missing numbers included, also if nothing names it by its hash.

    What was examined before is left out.
    """
    for kind in catalogue.KINDS:
        keys = set(list_objects(bench.store, bench.names, kind)) if kind.numbering == catalogue.DENSE else set[str]()
        for place in list(filter(None, map(kind.parse, keys))):
            # Back from each number that is there to the one before it that is there.
            numbers = range(int(place["number"]) - 1, max(0, int(place["number"]) - MAX_GAP), -1)
            between = (kind.path(**{**place, "number": number}) for number in numbers)
            keys.update(itertools.takewhile(lambda key, keys=keys: key not in keys, between))
        for key in sorted(keys):
            if bench.names.root + key not in bench.examined:
                bench.examine(bench.names.root + key, decodes(kind), prover="")


def _repair_generations(bench: Workbench) -> None:
    """Examine the marks of generations of the Redis copy: those that are there, and those that events and an epoch
    show.
    """
    names = bench.names
    archives = map(EVENT_ARCHIVE.parse, list_objects(bench.store, names, EVENT_ARCHIVE))
    shown = {int(place["last"]) for place in archives if place} - {1}
    keys = {names.root + key for key in list_objects(bench.store, names, GENERATION)}
    keys |= {names.generation(number) for number in shown if bench.exists(names.epoch(GENERATION_ROLE, number))}
    for key in sorted(keys - bench.examined):
        bench.examine(key, of_hash(_EMPTY), prover="its name", candidates=[("its name", b"")])


def _repair_token_logs(bench: Workbench) -> None:
    """Examine the trainer's log-probs that archived events name."""
    stored = [event.token_log_stored for event in archived_events(bench) if event.HasField("token_log_stored")]
    for named in {each.key: each for each in stored if TOKEN_LOG.parse(each.key)}.values():
        bench.examine_file(
            bench.names.root + named.key,
            sha256=named.sha256,
            size_bytes=named.size_bytes,
            prover="its event",
            without="nothing is made of it",
        )


def _json_judge(what: str) -> Callable[[bytes], str]:
    """Return a judge of bytes: it returns an empty text if they are a JSON object, else what is wrong.

    `what` names the object in that text.
    """

    def judge(data: bytes) -> str:
        """Return why the bytes are no JSON object; empty if they are one."""
        try:
            decode_object(data, what=f"the {what}", reason="OBJECT_CORRUPT")
        except CorruptObjectError as error:
            return error.message
        return ""

    return judge


def _repair_checkpoints(bench: Workbench, headers: dict[Position, Header]) -> None:
    """Examine the manifests of checkpoints, and restore from the backup the files that they prove.

    A damaged manifest is only noted, as nothing proves it. Without a checkpoint the trainer begins at an older one, or
    anew from the start model, if `headers` has that of step 0 and its chunks are there.
    """
    has_older = (0, 0) in headers and all(
        bench.exists(chunk.key) for chunk in headers[0, 0][1].chunks
    )  # the start model, and every batch since
    for step in list(list_checkpoints(bench.store, bench.names)):
        key = newest_revision(bench.store, bench.names.checkpoint_manifest(step))
        without = f"an older state than checkpoint {step} is whole: the trainer computes the steps since again"
        data = bench.examine(key, decodes(CHECKPOINT_MANIFEST), prover="", without=without if has_older else "")
        if data is None:
            continue
        whole = [
            bench.examine_file(
                str(item["key"]),
                sha256=str(item["sha256"]),
                size_bytes=int(item["size_bytes"]),
                prover=f"the manifest of checkpoint {step}",
                without=without if has_older else "",
            )
            for item in _items(data, "objects")
        ]
        has_older = has_older or all(whole)


def _repair_policies(bench: Workbench, headers: dict[Position, Header]) -> None:
    """Examine the manifests of policies, all revisions, and the objects that they prove.

    Where a version was published anew, its newest whole revision replaces the ones before. `headers` are the run's
    right headers.
    """
    digests = {item.key: item.digest for _, header in headers.values() for item in header.objects if item.digest}
    firsts = {
        bench.names.policy_manifest(lineage, version): f"the manifest of policy {lineage}-{version}"
        for version, lineage in list_policies(bench.store, bench.names)
    }
    copies = {revision_key(bench.names.root + own, 0) for own in list_objects(bench.store, bench.names, BASE_MANIFEST)}
    for first_key, what in (firsts | dict.fromkeys(sorted(copies), "the manifest of the adapters' base")).items():
        newest = find_newest(bench.store, first_key) or first_key
        without = ""
        for number in range(revision_of(newest), -1, -1):
            key = revision_key(first_key, number)
            if number == 0:
                data = bench.good.get(key) or bench.read(key)  # examined above where a header names it
            else:
                digest = digests.get(first_key.removeprefix(bench.names.root), "") or manifest_digest(
                    bench.read(first_key) or b""
                )
                judge = _manifest_judge(key, digest)
                prover = "the digest of the weights, which a header or the first manifest names" if digest else ""
                data = bench.examine(key, judge, prover=prover, without=without)
            is_whole = data is not None and _repair_objects(bench, data, what, without)
            if is_whole and not without:
                without = f"{key.removeprefix(bench.names.root)} was written in its place"


def _repair_objects(bench: Workbench, manifest: bytes, prover: str, without: str) -> bool:
    """Examine every object that a policy's manifest (its bytes) names; return whether all are there or can be restored.

    False also if the manifest cannot be read. `prover` and `without` are those of `Workbench.examine_file`.
    """
    try:
        objects = [item for encoding in _items(manifest, "encodings") for item in encoding["objects"]]
        files = [*objects, *_items(manifest, "files")]
        wanted = {str(item["key"]): (str(item["sha256"]), int(item["size_bytes"])) for item in files}
    except (CorruptObjectError, KeyError, TypeError, ValueError):
        return False
    whole = [
        bench.examine_file(key, sha256=sha256, size_bytes=size_bytes, prover=prover, without=without)
        for key, (sha256, size_bytes) in wanted.items()
    ]
    return all(whole)


def _manifest_judge(key: str, digest: str) -> Judge:
    """Return a judge of bytes: it returns an empty text if they are a policy's manifest, else what is wrong.

    The manifest must be that with the whole `key`. The weights of the policy must have `digest`, if that is not empty.
    """

    def judge(data: bytes) -> str:
        """Return in words why the bytes are not the wanted manifest; empty if they are."""
        try:
            manifest = decode_object(data, what="the manifest", reason="MANIFEST_CORRUPT")
        except CorruptObjectError as error:
            return error.message
        if manifest.get("key") != key:
            return f"it is the manifest {manifest.get('key')!r}"
        return "" if manifest.get("digest") == digest or not digest else "it is of other weights"

    return judge


def _items(data: bytes, name: str) -> Iterable[Any]:
    """Return a list in a manifest's JSON, by its name; empty if it is no list. CorruptObjectError if it is no JSON."""
    found = decode_object(data, what="a manifest", reason="MANIFEST_CORRUPT").get(name, [])
    return found if isinstance(found, list) else []


def require_run(store: ObjectStore, names: Names) -> None:
    """Raise `NotFoundError` if the store has nothing of the run (blocking)."""
    if next(iter(store.list(names.root)), None) is None:
        raise NotFoundError(
            f"{store.describe()} holds nothing of a run {names.uid}",
            reason="RUN_NOT_FOUND",
            remedy="check --store and --prefix",
        )
