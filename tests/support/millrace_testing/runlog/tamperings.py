"""Ways to tamper with an object of any kind that the catalogue declares, and what the audit has to find of each."""

import json
import string
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from millrace.rollouts.batch_wire import decode_header
from millrace.runlog import catalogue
from millrace.runlog.catalogue import ObjectKind
from millrace.storage import ObjectStore
from millrace_testing.runlog.recorded_log import Recorded, flip
from millrace_testing.runlog.scene import Scene, objects, rehash

ABSENT = {
    catalogue.TOMBSTONE,
    catalogue.REOPENING,
    catalogue.QUARANTINED,
    catalogue.BASE_MANIFEST,
    catalogue.BASE_OBJECT,
}
"""What a run that went well and is no fork does not have."""

SINGLE = {catalogue.RUN_JSON, catalogue.SEAL, catalogue.ATTESTATION, catalogue.POLICY_FILE}
"""What the recorded run has one object of."""


def kinds() -> list[ObjectKind]:
    """Return the kinds that a recorded run has objects of."""
    return [kind for kind in catalogue.KINDS if kind not in ABSENT]


def picks(keys: Sequence[str], way: "Way") -> list[str]:
    """Return what to tamper with of one kind: the first and the last of each form of name, in costly ways fewer."""
    nameless = sorted(keys, key=_form)
    ends = [(found[0], found[-1]) for _, group in groupby(nameless, key=_form) if (found := list(group))]
    if way in (swap, put_another):
        return sorted({keys[-1], *(first for first, _ in ends)})
    return sorted({keys[len(keys) // 2], keys[-1]} if way == change else {key for pair in ends for key in pair})


def _form(key: str) -> str:
    """Return the file's name without its numbers."""
    return key.rpartition("/")[2].translate(str.maketrans("", "", string.hexdigits))


def other_than(store: ObjectStore, key: str, keys: Sequence[str]) -> str:
    """Return an object of the kind that holds other bytes, of the same form and size if there is one."""
    data = store.get(key)
    others = [each for each in keys if store.get(each) != data]
    return min(others, key=lambda each: (_form(each) != _form(key), len(store.get(each)) != len(data)))


def remove(scene: Scene, key: str, keys: Sequence[str]) -> None:
    scene.store.delete(key)


def truncate(scene: Scene, key: str, keys: Sequence[str]) -> None:
    data = scene.store.get(key)
    scene.store.put(key, data[: len(data) // 2] if data else b"\1")


def flip_bit(scene: Scene, key: str, keys: Sequence[str]) -> None:
    if scene.store.get(key):
        flip(scene, key)
    else:
        scene.store.put(key, b"\1")


def swap(scene: Scene | Recorded, key: str, keys: Sequence[str]) -> None:
    """Have two objects of the kind change places."""
    other = other_than(scene.store, key, keys)
    mine, its = scene.store.get(key), scene.store.get(other)
    scene.store.put(key, its)
    scene.store.put(other, mine)


def put_another(scene: Scene | Recorded, key: str, keys: Sequence[str]) -> None:
    """Put another object of the kind in its place."""
    scene.store.put(key, scene.store.get(other_than(scene.store, key, keys)))


def put_another_runs(scene: Scene, key: str, keys: Sequence[str]) -> None:
    """Put the other run's object in its place."""
    (kind,) = {kind for kind, found in objects(scene.store, scene.names).items() if list(keys) == found}
    theirs = objects(scene.store, scene.other)[kind]
    scene.store.put(key, scene.store.get(theirs[keys.index(key)]))


def change(scene: Scene, key: str, keys: Sequence[str]) -> None:
    """Put another content of the same form there, and redo every hash in manifests and headers, and the chain."""
    data = scene.store.get(key)
    if data.startswith(b"{"):
        document = json.loads(data)
        document[next((name for name in ("created", "time") if name in document), "labels")] = "2020"
        data = json.dumps(document).encode()
    elif key.endswith(".pb") and "/chunk-" not in key:
        header = decode_header(data)
        header.resolutions[-1].reason = "stale"
        data = header.SerializeToString(deterministic=True)
    else:
        data = data[:-1] + bytes([data[-1] ^ 1]) if data else b"another"
    scene.store.put(key, data)
    rehash(scene)


Way = Callable[[Scene, str, Sequence[str]], None]
ALONE: list[Way] = [remove, truncate, flip_bit, put_another_runs, change]
IN_PAIRS = [swap, put_another]


def rows() -> Iterator[tuple[ObjectKind, Way]]:
    """Yield each kind with each way that changes it: of some a run has one, and marks of generations are all empty."""
    for kind in kinds():
        is_mark = kind == catalogue.GENERATION
        for way in [*ALONE, *([] if is_mark or kind in SINGLE else IN_PAIRS)]:
            if not (is_mark and way == put_another_runs):
                yield kind, way


def expected_depth(kind: ObjectKind, way: Way, scene: Scene, key: str, before: bytes) -> str:
    """Return the first audit that has to find it: one that reads no large object sees their sizes only."""
    if (kind == catalogue.ATTESTATION and way in (remove, change)) or (kind == catalogue.SEAL and way == change):
        return "attested"  # nothing in the store names the seal's bytes, or an attestation
    is_there = scene.store.head(key) is not None
    is_rehashed = way == change and kind != catalogue.TOKEN_LOG
    hides = kind.is_large and is_there and not is_rehashed and len(scene.store.get(key)) == len(before)
    return "deep" if hides else "fast"


def is_finding(kind: ObjectKind, way: Way, check: str) -> bool:
    """Return whether a finding is one that the declaration says; with every hash redone, a chain's."""
    if "CHAIN" in check and (way == change or (catalogue.CHAIN in kind.named_by and way != remove)):
        return True
    if kind == catalogue.SEAL and way == change:
        return check == "ATTESTATION_MISMATCH"
    if kind == catalogue.SEAL and way == flip_bit and not check.startswith("SEAL_"):
        # The bit may be of a key or of a hash that the seal names: then that object is not as the seal says.
        return check.startswith("NAMED_") or check.endswith(("_CHANGED", "_MISSING", "_UNNAMED"))
    return f"{kind.finding}_" in check and (way != remove or check.endswith("_MISSING"))


def add(scene: Scene | Recorded, kind: ObjectKind) -> str:
    """Copy the last object of a kind (run.json if there is none) to the next key of it, and return that."""
    keys = objects(scene.store, scene.names).get(kind, [])
    own = keys[-1].removeprefix(scene.names.root) if keys else ""
    fields = {name: spec for _, name, spec, _ in string.Formatter().parse(kind.key) if name}
    values = kind.parse(own) if keys else None
    values = dict(values or {name: 0 if spec else "ab" for name, spec in fields.items()})
    numbered = [name for name, spec in fields.items() if spec]
    if numbered:
        values[numbered[-1]] = int(values[numbered[-1]]) + 1
    elif keys and fields:
        values[next(iter(fields))] = "ff"
    key = scene.names.root + kind.path(**values)
    assert scene.store.create(key, scene.store.get(keys[-1] if keys else scene.names.run_json)), key
    return key
