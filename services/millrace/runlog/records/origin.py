"""Where a run's log begins: at step 0, or for a fork at the step that its `run.json` names."""

from dataclasses import dataclass, field

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog.names import Names
from millrace.runlog.records.frontier import ZERO_CHAIN_HASH, Frontier, genesis_hash
from millrace.runlog.records.run_record import REMEDY, RunRecord
from millrace.storage import ObjectStore


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
            f"run {names.uid} {'is being deleted' if is_deleted else 'is not in the store'}: no log to rebuild",
            reason="RUN_NOT_FOUND",
            remedy="`millrace run list` shows the runs",
            metadata={"uid": names.uid},
        )


def load_origin(store: ObjectStore, names: Names) -> RunOrigin:
    """The origin of a run, from its `run.json` (blocking); `NotFoundError` if there is none."""
    return parse_origin(store.get(names.run_json, max_bytes=MAX_JSON_BYTES), where=store.uri(names.run_json))


def parse_origin(run_json: bytes, *, where: str) -> RunOrigin:
    """The origin that a `run.json` names: its `parent` has base_step, chain_hash (hex), resolved_below, resolved_above.

    A run without a parent, or whose parent names neither step nor chain, begins at 0. `where` is for the error.
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
