"""The record of a run, `run.json`, and lists of a run's checkpoints and policies."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

from millrace.config import EvalRunConfig, RLConfig
from millrace.config.load import from_resolved
from millrace.decoding import MAX_JSON_BYTES, decode_object
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog.catalogue import CHECKPOINT_MANIFEST, POLICY_MANIFEST, ObjectKind
from millrace.runlog.names import Names
from millrace.runlog.records.frontier import ZERO_CHAIN_HASH, Frontier, genesis_hash
from millrace.runlog.records.sealed import load_seal
from millrace.storage import ObjectStore
from millrace.storage.base import find_newest, revision_key, revision_of
from millrace.v1 import run_pb2

RL, EVAL, UNKNOWN = "RL", "EVAL", "UNSPECIFIED"
"""Kinds of runs, as `run.json` names them; the last one where it cannot be read."""
REMEDY = "restore the object from a replica of the bucket"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The immutable part of a run. A field that the document does not have is empty."""

    uid: str = ""
    name: str = ""
    kind: str = ""
    config: dict[str, Any] | None = None
    run_hash: str = ""
    request_id: str = ""
    create_time: str = ""
    code_version: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    parent: dict[str, Any] | None = None
    """For a fork: where it begins, as `parse_origin` reads it."""
    tenant: str = ""
    """Who submitted it; empty for an operator. A fork has its parent's."""

    @classmethod
    def parse(cls, data: bytes, *, where: str, needs: Collection[str] = ()) -> Self:
        """Parse a record that may lack fields; `CorruptObjectError` names the document by `where`.

        Unknown fields are ignored, and so are those with a wrong type that are only shown. It is an error if a field of
        `needs` is missing, or another one has a wrong type.
        """
        document = decode_object(data, what=where, reason="RUN_JSON_CORRUPT", remedy=REMEDY)
        found: dict[str, Any] = {}
        for name, kind in _TYPES.items():
            if (value := document.get(name)) is None and name not in needs:
                continue
            if not isinstance(value, kind):
                if name in _ONLY_SHOWN and name not in needs:
                    continue
                raise CorruptObjectError(f"{where} has no usable {name}", reason="RUN_JSON_CORRUPT", remedy=REMEDY)
            found[name] = value
        return cls(**found)

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Self:
        """Parse the record of a run that is shown or driven: every field but `parent` and `tenant` has to be there
        and valid.

        Else `CorruptObjectError`, naming the document by `where`.
        """
        record = cls.parse(data, where=where, needs=_TYPES.keys() - {"parent", "tenant"})
        try:
            record.describe()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptObjectError(f"{where} holds no run: {error!r}"[:500], reason="RUN_JSON_CORRUPT") from error
        return record

    @classmethod
    def unreadable(cls, uid: str, name: str) -> Self:
        """Return a record of the kind UNKNOWN for a run whose `run.json` cannot be read."""
        return cls(uid=uid, name=name, kind=UNKNOWN, config={})

    def encode(self) -> bytes:
        """Return the record as JSON with sorted keys; `parent` and `tenant` only where there is one."""
        document = {name: getattr(self, name) for name in _TYPES}
        for name in ("parent", "tenant"):
            if not document[name]:
                del document[name]
        return json.dumps(document, sort_keys=True, indent=1).encode()

    @property
    def config_json(self) -> str:
        """Return the resolved config as canonical JSON."""
        return json.dumps(self.config, sort_keys=True)

    @cached_property
    def settings(self) -> RLConfig | EvalRunConfig:
        """Return the config as a typed object, by the run's kind; ValueError if it is of another release."""
        return from_resolved(self.config or {}, EvalRunConfig if self.kind == EVAL else RLConfig)

    @property
    def training(self) -> RLConfig:
        """Return the config of a run that trains; ValueError for an evaluation, or a config of another release."""
        if not isinstance(self.settings, RLConfig):
            raise ValueError(f"run {self.name} trains nothing")
        return self.settings

    def describe(self) -> run_pb2.Run:
        """Return the run as the public API shows it before its first event.

        ValueError and the like if a field is malformed.
        """
        run = run_pb2.Run(
            name=f"runs/{self.name}",
            uid=self.uid,
            kind=f"RUN_KIND_{self.kind}",
            state=run_pb2.RUN_STATE_QUEUED,
            config_json=self.config_json,
            run_hash=self.run_hash,
            labels=self.labels,
            tenant=self.tenant,
        )
        if self.create_time:
            run.create_time.FromJsonString(self.create_time)
        max_steps = (self.config or {}).get("max_steps")
        run.progress.max_steps = max_steps if isinstance(max_steps, int) else 0
        if (parent := self.parent) is not None:
            run.parent.CopyFrom(
                run_pb2.RunParent(name=f"runs/{parent['name']}", uid=parent["uid"], step=parent["step"])
            )
            run.progress.step = run.progress.policy_version = parent["base_step"]
        return run


_TYPES: dict[str, type] = dict.fromkeys((each.name for each in fields(RunRecord)), str)
# Every other field is a string.
_TYPES |= {"config": dict, "labels": dict, "parent": dict}
_ONLY_SHOWN = {"labels", "create_time", "code_version"}


# Where a run's log begins: at step 0, or for a fork at the step that its `run.json` names.


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """What comes before the first header of a log."""

    base_step: int = 0
    """Step of the first header, and the first policy version."""
    chain_hash: bytes = ZERO_CHAIN_HASH
    """`previous_chain_hash` of the first header, 32 bytes: the genesis hash."""
    parent_chain_hash: bytes = ZERO_CHAIN_HASH
    """For a fork: the chain hash of the parent before `base_step`."""
    frontier: Frontier = field(default_factory=Frontier)
    """The ordinals that are resolved before the first header."""
    orchestrator_state: bytes = b""
    """For a fork: the state of the orchestrator in the parent's header before `base_step`."""


def require_exists(store: ObjectStore, names: Names) -> None:
    """Raise `NotFoundError` if the store has no such run, or is about to delete it (blocking)."""
    is_deleted = store.head(names.tombstone) is not None
    if is_deleted or store.head(names.run_json) is None:
        raise NotFoundError(
            f"run {names.uid} "
            + ("is being deleted: nothing opens, resumes or forks it" if is_deleted else "is not in the store"),
            reason="RUN_NOT_FOUND",
            remedy="`millrace run list` shows the runs",
            metadata={"uid": names.uid},
        )


def load_origin(store: ObjectStore, names: Names) -> RunOrigin:
    """Return where the log of a run begins, by its `run.json` (blocking); `NotFoundError` if there is none."""
    return parse_origin(store.get(names.run_json, max_bytes=MAX_JSON_BYTES), where=store.uri(names.run_json))


def parse_origin(run_json: bytes, *, where: str) -> RunOrigin:
    """Return where the log of a run begins, by the `parent` in the bytes of its `run.json`.

    `parent` has base_step, chain_hash (hex), resolved_below and resolved_above. A run without a parent, or whose parent
    names neither step nor chain, begins at 0. `CorruptObjectError`, naming `where`, if it is malformed.
    """
    parent = RunRecord.parse(run_json, where=where).parent or {}
    try:
        if "chain_hash" not in parent and not parent.get("base_step"):
            return RunOrigin(chain_hash=genesis_hash(ZERO_CHAIN_HASH, run_json))
        chain = bytes.fromhex(parent["chain_hash"])
        if len(chain) != len(ZERO_CHAIN_HASH):
            raise ValueError(f"a chain hash has {len(ZERO_CHAIN_HASH)} bytes, not {len(chain)}")
        base_step = int(parent.get("base_step", 0))
        if not 0 <= base_step < 1 << 63:
            raise ValueError(f"base_step is {base_step}")
        frontier = Frontier(int(parent.get("resolved_below", 0)), frozenset(map(int, parent.get("resolved_above", ()))))
        state = parent.get("orchestrator_state", "")
        return RunOrigin(base_step, genesis_hash(chain, run_json), chain, frontier, str(state).encode())
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CorruptObjectError(
            f"{where} names no usable parent: {error!r}",
            reason="RUN_JSON_CORRUPT",
            remedy=REMEDY,
        ) from error


# What a run has of checkpoints and policies, from the names of their places alone (blocking).


def list_objects(store: ObjectStore, names: Names, kind: ObjectKind, *, after: str = "") -> Iterator[str]:
    """Yield the keys, without the run's prefix, of all stored objects of a kind that sort after the key `after`
    (blocking).
    """
    for info in store.list(names.root + kind.folder, start_after=names.root + after if after else ""):
        if kind.parse(key := info.key.removeprefix(names.root)) is not None:
            yield key


def list_checkpoints(store: ObjectStore, names: Names) -> Iterator[int]:
    """Yield the steps of the run's committed checkpoints, ascending (blocking).

    One without a manifest is not committed, or being removed.
    """
    places = (checkpoint_at(names, prefix) for prefix in store.list_prefixes(names.checkpoints))
    for step in sorted(step for step in places if step is not None):
        if find_newest(store, names.checkpoint_manifest(step)) is not None:
            yield step


def list_policies(store: ObjectStore, names: Names) -> list[tuple[int, int]]:
    """Return (version, lineage) of every policy that was begun, ascending (blocking).

    Those with a manifest are published.
    """
    places = (policy_at(names, prefix) for prefix in store.list_prefixes(names.policies))
    return sorted(place for place in places if place is not None)


def published_policies(store: ObjectStore, names: Names) -> Iterator[tuple[int, str]]:
    """Yield version and whole key of the manifest of every published policy, the newest version and lineage first
    (blocking).

    The key is that of the newest revision. Of a run that has succeeded only those that its seal names: what was
    published after the seal does not count.
    """
    seal = load_seal(store, names)
    is_whole = seal is not None and seal.others is not None and seal.state == "SUCCEEDED"
    for version, lineage in reversed(list_policies(store, names)):
        first = names.policy_manifest(lineage, version)
        if (newest := find_newest(store, first)) is None:
            continue
        # Of a run that is sealed as a whole, the newest revision that the seal names.
        revisions = (revision_key(first, number) for number in range(revision_of(newest), -1, -1))
        for key in revisions if is_whole else (newest,):
            if seal is None or not is_whole or key.removeprefix(names.root) in seal.objects:
                yield version, key
                break


def checkpoint_at(names: Names, prefix: str) -> int | None:
    """Return the step of the checkpoint under a prefix; None if that is no checkpoint's place."""
    place = CHECKPOINT_MANIFEST.parse(f"{prefix.removeprefix(names.root)}manifest.json")
    return None if place is None else int(place["step"])


def policy_at(names: Names, prefix: str) -> tuple[int, int] | None:
    """Return (version, lineage) of the policy under a prefix; None if that is no policy's place."""
    place = POLICY_MANIFEST.parse(f"{prefix.removeprefix(names.root)}manifest.json")
    return None if place is None else (int(place["version"]), int(place["lineage"]))
