"""Where a run's log begins: at step 0, or for a fork at the step that its `run.json` names."""

import json
from dataclasses import dataclass, field

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog.frontier import ZERO_CHAIN_HASH, Frontier
from millrace.runlog.names import Names
from millrace.storage import ObjectStore


@dataclass(frozen=True, slots=True)
class Origin:
    """What comes before the first header of a log."""

    base_step: int = 0
    """Step of the first header, and the first policy version."""
    chain_hash: bytes = ZERO_CHAIN_HASH
    """`previous_chain_hash` of the first header, 32 bytes."""
    frontier: Frontier = field(default_factory=Frontier)
    """The ordinals that are resolved before the first header."""


def require_exists(store: ObjectStore, names: Names) -> None:
    """Raise `NotFoundError` if the store has no such run, or is about to delete it (blocking)."""
    is_deleted = store.head(names.tombstone) is not None
    if is_deleted or store.head(names.run_json) is None:
        raise NotFoundError(
            f"run {names.uid} {'is being deleted' if is_deleted else 'is not in the store'}: no log to rebuild",
            reason="RUN_NOT_FOUND",
            remedy="`millrace run list` shows the runs",
            metadata={"uid": names.uid},
        )


def load_origin(store: ObjectStore, names: Names) -> Origin:
    """The origin of a run, from its `run.json` (blocking); `NotFoundError` if there is none."""
    return parse_origin(store.get(names.run_json), where=store.uri(names.run_json))


def parse_origin(run_json: bytes, *, where: str) -> Origin:
    """The origin that a `run.json` names: its `parent` has base_step, chain_hash (hex), resolved_below, resolved_above.

    A run without a parent, or whose parent names no base_step, begins at 0. `where` is for the error.
    """
    try:
        parent = json.loads(run_json).get("parent") or {}
        if not parent.get("base_step"):
            return Origin()
        chain = bytes.fromhex(parent["chain_hash"])
        if len(chain) != len(ZERO_CHAIN_HASH):
            raise ValueError(f"a chain hash has {len(ZERO_CHAIN_HASH)} bytes, not {len(chain)}")
        frontier = Frontier(int(parent.get("resolved_below", 0)), frozenset(map(int, parent.get("resolved_above", ()))))
        return Origin(int(parent["base_step"]), chain, frontier)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptObjectError(
            f"{where} names no usable parent: {error!r}",
            reason="RUN_JSON_CORRUPT",
            remedy="restore the object from a replica of the bucket",
        ) from error
