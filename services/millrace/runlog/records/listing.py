"""What a run has of checkpoints and policies, from the names of their places alone (blocking)."""

from collections.abc import Iterator

from millrace.runlog.catalogue import CHECKPOINT_MANIFEST, POLICY_MANIFEST, ObjectKind
from millrace.runlog.names import Names
from millrace.runlog.records.sealed import load_seal
from millrace.storage import ObjectStore
from millrace.storage.commit_points import find_newest, revision_key, revision_of


def list_objects(store: ObjectStore, names: Names, kind: ObjectKind, *, behind: str = "") -> Iterator[str]:
    """Yield the keys of all objects of a kind that sort after `behind`; keys are behind the run's prefix."""
    for info in store.list(names.root + kind.folder, start_after=names.root + behind if behind else ""):
        if kind.parse(key := info.key.removeprefix(names.root)) is not None:
            yield key


def list_checkpoints(store: ObjectStore, names: Names) -> Iterator[int]:
    """Steps of the committed checkpoints, ascending; what has no manifest was never committed, or is being pruned."""
    places = (checkpoint_at(names, prefix) for prefix in store.list_prefixes(names.checkpoints))
    for step in sorted(step for step in places if step is not None):
        if find_newest(store, names.checkpoint_manifest(step)) is not None:
            yield step


def list_policies(store: ObjectStore, names: Names) -> list[tuple[int, int]]:
    """(version, lineage) of every policy that was begun, ascending; only those with a manifest are published."""
    places = (policy_at(names, prefix) for prefix in store.list_prefixes(names.policies))
    return sorted(place for place in places if place is not None)


def published_policies(store: ObjectStore, names: Names) -> Iterator[tuple[int, str]]:
    """Version and manifest's key of every published policy, the newest version and lineage first.

    Of a run that has succeeded, those that its seal names: nobody publishes behind it.
    """
    seal = load_seal(store, names)
    is_whole = seal is not None and seal.others is not None and seal.state == "SUCCEEDED"
    for version, lineage in reversed(list_policies(store, names)):
        first = names.policy_manifest(lineage, version)
        if (newest := find_newest(store, first)) is None:
            continue
        revisions = (revision_key(first, number) for number in range(revision_of(newest), -1, -1))
        for key in revisions if is_whole else (newest,):
            if seal is None or not is_whole or key.removeprefix(names.root) in seal.objects:
                yield version, key
                break


def checkpoint_at(names: Names, prefix: str) -> int | None:
    """The step whose checkpoint lies under a prefix; None if that is no checkpoint's place."""
    place = CHECKPOINT_MANIFEST.parse(f"{prefix.removeprefix(names.root)}manifest.json")
    return None if place is None else int(place["step"])


def policy_at(names: Names, prefix: str) -> tuple[int, int] | None:
    """(version, lineage) of the policy that lies under a prefix; None if that is no policy's place."""
    place = POLICY_MANIFEST.parse(f"{prefix.removeprefix(names.root)}manifest.json")
    return None if place is None else (int(place["version"]), int(place["lineage"]))
