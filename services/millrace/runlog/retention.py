"""Retention: which objects of a run are removed, by the classes of the catalogue, and in which order.

    plan       the config keys, the checkpoints, the policies in use  →  what is retired of each class
    record     `retirements/{number}.json` (`records/retirement.py`), before the first object goes
    remove     the objects of every step or version that the record adds; what stays is tried again

A process that dies in between leaves a record whose objects are still there: the next pass begins with them. What is
retired never comes back. Everything here reads and writes the store (blocking).
"""

import datetime
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

from millrace.config import EvalRunConfig, RLConfig
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog import catalogue
from millrace.runlog.catalogue import POLICY_MANIFEST, KeptAs, ObjectKind
from millrace.runlog.names import Names
from millrace.runlog.records.retirement import Retired, Retirement, newest_retirement
from millrace.storage import ObjectStore
from millrace.storage.base import find_newest
from millrace.storage.clean_up import delete_all
from millrace.telemetry import faults
from millrace.telemetry.leftovers import Leftover

logger = logging.getLogger(__name__)

MOST_PER_PASS = 1024
"""Most steps or versions that one record adds: where retention is switched on late, the run is caught up in passes."""
_AT_ONCE = 8  # steps or versions whose objects are removed at once
_MAX_LEFT = 3  # objects that cannot be deleted, until a pass gives up for this time
_NAMES = {KeptAs.BATCHES: "batch object", KeptAs.POLICIES: "policy object", KeptAs.CHECKPOINTS: "checkpoint object"}
_OF_RULES = (KeptAs.BATCHES, KeptAs.POLICIES)  # the trainer retires checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """How many of its newest steps and versions a run keeps, by its config; None keeps everything."""

    batches: int | None = None
    """Newest steps that can be replayed, forked at and exported."""
    policies: int | None = None
    """Newest versions that can be loaded."""

    @classmethod
    def of(cls, config: RLConfig | EvalRunConfig, asked: Mapping[str, Any] = MappingProxyType({})) -> "RetentionRule":
        """Return the rule of a run's config: nothing is retired of an evaluation.

        `asked` has the values ("batches", "policies") that a `run resume` has set instead of the config's.
        """
        if not isinstance(config, RLConfig):
            # An evaluation is read as a whole.
            return cls()
        settings = config.orchestrator
        named = {"batches": settings.retain_batches, "policies": settings.retain_policies, **asked}
        return cls(batches=_number(named["batches"]), policies=_number(named["policies"]))

    @property
    def stride(self) -> int:
        """Return after how many steps the next pass is due: an eighth of the smaller number that is kept, at least
        one.
        """
        return max(1, min(number for number in (self.batches, self.policies, 1 << 16) if number is not None) // 8)

    def __bool__(self) -> bool:
        """Return whether the rule ever retires anything."""
        return self.batches is not None or self.policies is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNeeds:
    """The state of a run by which it is decided what it still needs."""

    next_step: int
    """The step after the last committed one."""
    checkpoints: Sequence[int]
    """Steps of the committed checkpoints, ascending."""
    is_pruned: bool = False
    """Older checkpoints were retired, so that the start model is no start any more for what came after them."""
    newest_policy: tuple[int, int] | None = None
    """Lineage and version of the newest published policy."""
    oldest_in_use: int | None = None
    """Oldest version that a replica serves or shall serve; None if none does."""


def plan(rule: RetentionRule, view: RunNeeds, anchor_of: Callable[[int, int], int]) -> dict[KeptAs, Retired]:
    """Return what the rule retires of each class for a run in the state `view`; nothing is removed here.

    `anchor_of` returns, for the newest lineage (at most the first argument) of a version (the second), the oldest
    version whose objects it is made of. Nothing is retired before there is a checkpoint: until then the trainer begins
    anew with the first batch.

    A run stays resumable at its newest two checkpoints, since one may turn out to be damaged: what comes after the
    older one is never retired. The start model is the second one of a run that has written one checkpoint only. Version
    0 stays: it is the start model, which adapters and replays are based on.
    """
    resumable = list(view.checkpoints[-2:])
    found: dict[KeptAs, Retired] = {}
    if not resumable:
        return found
    if len(resumable) == 1 and not view.is_pruned:
        # A run that kept its start has the start model as the other point to resume at.
        resumable = [0, *resumable]
    if rule.batches is not None:
        promised = view.next_step - rule.batches
        # Who replays or forks the oldest promised step begins at the checkpoint before it, and reads all batches since.
        # Without a checkpoint before them the promised steps begin at the start model, or can be read only.
        start = max(promised, 0) if view.is_pruned else 0
        base = max((step for step in view.checkpoints if step <= promised), default=start)
        why = f"orchestrator.retain_batches = {rule.batches}"
        found[KeptAs.BATCHES] = Retired(below=min(base, resumable[0]), why=why)
    if rule.policies is not None and view.newest_policy is not None:
        lineage, version = view.newest_policy
        used = version if view.oldest_in_use is None else view.oldest_in_use
        oldest = max(0, min(version - rule.policies + 1, used, resumable[0]))
        below = anchor_of(lineage, oldest)
        # A checkpoint needs its own version, which is a chain of deltas that begins at its anchor.
        kept = [range(anchor_of(lineage, step), step + 1) for step in view.checkpoints if step < below]
        keeps = frozenset(number for numbers in (range(1), *kept) for number in numbers if number < below)
        why = f"orchestrator.retain_policies = {rule.policies}"
        found[KeptAs.POLICIES] = Retired(below=below, keeps=keeps, lineage=lineage, why=why)
    return found


class _StoppedError(Exception):
    """The pass has to stop: `stopping` is set, or another process drives the run. Never leaves this module."""


class Retention:
    """Retires and removes what one run no longer keeps. One writer calls `run` again and again as the run grows."""

    def __init__(
        self, store: ObjectStore, names: Names, *, first: int, by: str, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        """Create the retention of one run; nothing is read yet.

        `first` is the first step that the run may have, and `by` names the writer in its records. `may_write` returns
        whether the writer still drives the run; it is asked before each record and while objects are removed.
        """
        self._store, self._names, self._by, self._may_write = store, names, by, may_write
        self._first = first
        self.stopping = threading.Event()
        """Ends a pass at its next step or version; a later one goes on with it."""
        self._anchors: dict[tuple[int, int], int] = {}
        self._first_lineage = 0
        """Older lineages have none of the versions that are not retired yet."""
        self._removed: Retirement | None = None
        """The newest record whose objects are gone as far as this writer knows; None before the first look."""

    def run(self, rule: RetentionRule, view: RunNeeds) -> list[Leftover]:
        """Do one pass: finish the one before, write a record of what the rule retires besides, and remove it
        (blocking).

        Returns what cannot be removed now; the next pass tries it again before it retires more. Nothing more is done
        once `stopping` is set, or the writer does not drive the run any more.
        """
        try:
            return self._run(rule, view)
        except _StoppedError:
            return []

    def finish(self) -> list[Leftover]:
        """Remove what the newest record retires and an interrupted pass has left; return what cannot be removed now.

        Nothing more is retired, so it may be done for a run that has ended.
        """
        newest = newest_retirement(self._store, self._names)
        if newest is None:
            return []
        try:
            return self._remove(newest, _previous(self._store, self._names, newest))
        except _StoppedError:
            return []

    def _run(self, rule: RetentionRule, view: RunNeeds) -> list[Leftover]:
        """Do one pass as `run` says; raise _StoppedError where it has to stop."""
        newest = newest_retirement(self._store, self._names) if self._removed is None else self._removed
        if newest is not None and self._removed is None:
            # Nobody knows how far the writer of the last record came.
            before = _previous(self._store, self._names, newest)
            if left := self._remove(newest, before):
                return left
        self._removed = newest or _nothing(self._names)
        known = self._removed.number
        # Asked for anew, because the trainer writes records of checkpoints among ours.
        stored = newest_retirement(self._store, self._names, known=known)
        is_pruned = stored is not None and stored.of(KeptAs.CHECKPOINTS).below > 0
        view = replace(view, is_pruned=view.is_pruned or is_pruned)
        wanted = _bounded(plan(rule, view, self._anchor_of), self._removed, first=self._first)
        self._require_ours()
        record = record_retirement(self._store, self._names, wanted, by=self._by, known=known)
        if record is None:
            return []
        faults.reach(faults.Point.ORCHESTRATOR_RETIRED, step=view.next_step)
        # None until all of it is removed: a pass that fails begins with this record again.
        before, self._removed = self._removed, None
        if left := self._remove(record, before):
            return left
        self._removed = record
        logger.info("retired", extra={"uid": self._names.uid, "record": record.number, **_in_numbers(record)})
        return []

    def _anchor_of(self, lineage: int, version: int) -> int:
        """Return the oldest version whose objects a policy version is made of.

        `version` itself if it is not in the store. Of the version's lineages up to `lineage` the newest counts.
        """
        # Manifests never change, and passes ask for the same versions again and again.
        if (lineage, version) not in self._anchors:
            self._anchors[lineage, version] = self._read_anchor(lineage, version)
        return self._anchors[lineage, version]

    def _read_anchor(self, lineage: int, version: int) -> int:
        """Return the oldest version whose stored objects are needed to restore a policy version, as its manifest says.

        The manifest is that of the newest lineage up to `lineage` which has the version. Without a manifest the result
        is `version` itself.
        """
        for number in range(lineage, -1, -1):
            key = find_newest(self._store, self._names.policy_manifest(number, version))
            if key is not None:
                manifest = POLICY_MANIFEST.decode(self._store.get(key), where=self._store.uri(key))
                return min(int(manifest.anchor), version)
        return version

    def _remove(self, record: Retirement, before: Retirement) -> list[Leftover]:
        """Remove the objects that `record` retires in addition to `before`; return what could not be removed.

        After `_MAX_LEFT` failures the rest waits for the next pass. Raises `_StoppedError` as `_require_ours` does.
        """
        left: list[Leftover] = []
        for kept in _OF_RULES:
            work = partial(self._remove_number, kept, record.of(kept).lineage)
            numbers = (number for number in added(record.of(kept), before.of(kept)) if number >= self._first)
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="retention") as pool:
                while len(left) < _MAX_LEFT and (window := list(islice(numbers, _AT_ONCE))):
                    self._require_ours()
                    for stays in pool.map(work, window):
                        left += stays
                    faults.reach(faults.Point.ORCHESTRATOR_MID_RETIRE, step=window[-1])
        return left

    def _require_ours(self) -> None:
        """Raise _StoppedError if the pass has to end, or if the writer does not drive the run any more."""
        if self.stopping.is_set() or not self._may_write():
            raise _StoppedError

    def _remove_number(self, kept: KeptAs, lineage: int, number: int) -> list[Leftover]:
        """Remove the objects of a class of one step or version (`number`); return what could not be removed.

        Of a version, those of every lineage up to `lineage`.
        """
        if kept is not KeptAs.POLICIES:
            return remove_place(self._store, self._names, kept, step=number)
        left = list[Leftover]()
        # Any lineage may have published this version.
        for each in range(self._first_lineage, lineage + 1):
            left += remove_place(self._store, self._names, kept, lineage=each, version=number)
        return left


def record_retirement(
    store: ObjectStore, names: Names, wanted: Mapping[KeptAs, Retired], *, by: str, known: int = 0
) -> Retirement | None:
    """Write a record that retires `wanted` in addition to what is retired already, and return it (blocking).

    None, and no record, if nothing is added. What others have retired meanwhile stays retired. `by` names the writer;
    `known` is the number of a record that exists, 0 if none is known.
    """
    while True:
        newest = newest_retirement(store, names, known=known) or _nothing(names)
        retired = {**newest.retired, **{kept: _joined(each, newest.of(kept)) for kept, each in wanted.items()}}
        if all(next(added(retired[kept], newest.of(kept)), None) is None for kept in wanted):
            return None
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        record = Retirement(number=newest.number + 1, run_uid=names.uid, retired=retired, by=by, time=time)
        # Another writer may have taken the number: then what it retired is joined, too.
        if store.create(names.retirement(record.number), record.encode()):
            return record


def added(retired: Retired, before: Retired) -> Iterator[int]:
    """Yield the steps or versions that `retired` covers and `before` does not, ascending.

    Those below the earlier bound, which were kept until now, come first.
    """
    # Checkpoints that were kept below the bound, and go now together with what they needed.
    given_up = (number for number in sorted(before.keeps - retired.keeps) if number < before.below)
    new = (number for number in range(before.below, retired.below) if number not in retired.keeps)
    yield from given_up
    yield from new


def remove_place(store: ObjectStore, names: Names, kept: KeptAs, **place: int) -> list[Leftover]:
    """Remove the objects of the class `kept` that belong to one step or version, and what dead writers left there
    (blocking).

    `place` is `step=…`, or `lineage=…` and `version=…`. The objects that make it count as complete go first; if one of
    them cannot be removed, neither is what it names, so that a checkpoint is never incomplete. Returns what could not
    be removed.
    """
    keys = keys_at(store, names, kept, **place)
    # The commit points are among the kinds with revisions.
    for group in (
        [key for kind, key in keys if kind.has_revisions],
        [key for kind, key in keys if not kind.has_revisions],
    ):
        if left := delete_all(store, group, what=_NAMES[kept], most=_MAX_LEFT):
            return left
    return []


def keys_at(store: ObjectStore, names: Names, kept: KeptAs, **place: int) -> list[tuple[ObjectKind, str]]:
    """Return kind and whole key of each stored object of a class that belongs to one step or version (blocking).

    `place` is `step=…`, or `lineage=…` and `version=…`.
    """
    kinds = [kind for kind in catalogue.KINDS if kind.kept is kept]
    found: dict[str, ObjectKind] = {}
    for prefix in dict.fromkeys(kind.prefix(**place) for kind in kinds):
        for info in store.list(names.root + prefix):
            kind = catalogue.kind_at(info.key.removeprefix(names.root))
            if kind is not None and kind.kept is kept:
                found[info.key] = kind
    return [(kind, key) for key, kind in found.items()]


def _nothing(names: Names) -> Retirement:
    """Return the record, numbered 0, of a run of which nothing is retired; it is stored nowhere."""
    return Retirement(number=0, run_uid=names.uid)


def _previous(store: ObjectStore, names: Names, newest: Retirement) -> Retirement:
    """Return the newest record that differs from `newest` in batches or policies: what it retires was removed before.

    The trainer writes records in between, so it is found by bisection, as nothing that is retired comes back. Where it
    cannot be read, return one of which nothing is retired: nothing is known to be gone.
    """

    def read(number: int) -> Retirement:
        key = names.retirement(number)
        return Retirement.decode(store.get(key), where=store.uri(key)) if number else _nothing(names)

    def is_before(record: Retirement) -> bool:
        return any(record.of(kept) != newest.of(kept) for kept in _OF_RULES)

    low, high = 0, newest.number
    try:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_before(read(middle)) else (low, middle)
        return read(low)
    except (NotFoundError, CorruptObjectError):  # the audit finds it; what is gone is looked for once more
        return _nothing(names)


def _joined(wanted: Retired, before: Retired) -> Retired:
    """Return what is retired in all by `wanted` and by `before`: what was retired before stays retired."""
    below = max(wanted.below, before.below)
    # Below the earlier bound, only what was kept then still exists.
    keeps = {number for number in wanted.keeps if number >= before.below or number in before.keeps}
    keeps |= before.keeps if wanted.below < before.below else set()
    return Retired(
        below=below, keeps=frozenset(keeps), lineage=max(wanted.lineage, before.lineage), why=wanted.why or before.why
    )


def _bounded(wanted: Mapping[KeptAs, Retired], before: Retirement, *, first: int) -> dict[KeptAs, Retired]:
    """Return `wanted` limited to `MOST_PER_PASS` further steps or versions per class beyond `before`, counted from
    `first`.
    """
    bounds = {kept: max(before.of(kept).below, first) + MOST_PER_PASS for kept in wanted}
    return {
        kept: replace(
            each,
            below=min(each.below, bounds[kept]),
            keeps=frozenset(number for number in each.keeps if number < bounds[kept]),
        )
        for kept, each in wanted.items()
    }


def _in_numbers(record: Retirement) -> dict[str, Any]:
    """Return for the log below which number each class is retired."""
    return {f"{kept.name.lower()}_below": each.below for kept, each in record.retired.items()}


def _number(value: object) -> int | None:
    """Return the value of a config key if it is a positive whole number; else None, which keeps everything."""
    return value if type(value) is int and value >= 1 else None
