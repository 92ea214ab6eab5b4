"""Checkpoints: each proves the batches that it was trained on, its objects are there, and none is missing."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.runlog.audit.findings import Audit
from millrace.runlog.records.listing import checkpoint_at
from millrace.storage.commit_points import find_newest, newest_revision


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFact:
    """What the audit keeps of a committed checkpoint."""

    step: int
    chain_hash: str
    lineage: int
    manifest_sha256: str
    is_repaired: bool
    """A later manifest stands in for the first one."""
    files: Mapping[str, tuple[str, int]]
    """Key and bytes by name; empty if one of them is not there."""


def check_checkpoints(audit: Audit, *, run_hash: str) -> list[CheckpointFact]:
    """Check manifests and objects of all committed checkpoints; returns them, oldest first."""
    facts: list[CheckpointFact] = []
    torn = 0
    for prefix in list(audit.store.list_prefixes(audit.names.checkpoints)):
        if (step := checkpoint_at(audit.names, prefix)) is None:
            audit.findings.violation("CHECKPOINT_CORRUPT", f"{audit.uri(prefix)} is no checkpoint's place")
            continue
        if audit.store.head(f"{prefix}manifest.json") is None:
            torn += 1
            continue
        fact = _check(audit, prefix, step, run_hash=run_hash)
        if fact is not None:
            facts.append(fact)
    if torn:
        audit.findings.note(
            "CHECKPOINTS_TORN", f"{torn} checkpoints were uploaded in part and never committed; nobody reads them"
        )
    audit.report.num_checkpoints = len(facts)
    return sorted(facts, key=lambda fact: fact.step)


def compare_chains(audit: Audit, facts: Sequence[CheckpointFact], chains: Mapping[int, bytes]) -> None:
    """Checkpoint k was trained on the batches that H(k - 1) proves."""
    last = max(chains)
    for fact in facts:
        chain = chains.get(fact.step - 1)
        if fact.step - 1 > last:
            audit.findings.violation(
                "CHECKPOINT_AHEAD", f"checkpoint {fact.step} exists, but step {fact.step - 1} is not committed"
            )
        elif chain is not None and fact.chain_hash != chain.hex():
            audit.findings.violation(
                "CHECKPOINT_CHAIN_MISMATCH",
                f"checkpoint {fact.step} was trained on the chain {fact.chain_hash[:16]}…, the headers give "
                f"{chain.hex()[:16]}…",
            )


def compare_saved(
    audit: Audit,
    facts: Sequence[CheckpointFact],
    saved: Mapping[int, frozenset[str]],
    *,
    kept: tuple[int | None, int | None],
    base_step: int,
) -> set[int]:
    """What was ever saved, as events and seals say, is there unless retention removes it; returns what it removed.

    `saved` are the hashes of manifests by step; `kept` are `keep_last` and `keep_interval`. Retention keeps the newest
    `keep_last` of those that were saved, and the multiples of `keep_interval`.
    """
    there = {fact.step: fact for fact in facts}
    known = sorted({*there, *saved, *([base_step] if base_step else ())})
    promised = _promised(known, *kept)
    for step in known:
        if step not in there and step in promised and _has_no_manifest(audit, step):
            uri = audit.uri(audit.names.checkpoint_manifest(step))
            audit.findings.violation(
                "CHECKPOINT_MISSING", f"checkpoint {step} was saved and [ckpt] keeps it, but {uri} does not exist"
            )
    for step, fact in there.items():
        hashes = saved.get(step, frozenset())
        if hashes and not fact.is_repaired and fact.manifest_sha256 not in hashes:
            audit.findings.violation(
                "CHECKPOINT_CHANGED",
                f"the manifest of checkpoint {step} has sha256 {fact.manifest_sha256[:16]}…, its event names "
                f"{', '.join(sorted(one[:16] for one in hashes))}…",
            )
    return {step for step in known if step not in there and step not in promised}


def _promised(steps: Sequence[int], keep_last: int | None, keep_interval: int | None) -> set[int]:
    if keep_last is None:
        return set(steps)
    return set(steps[-keep_last:]) | {step for step in steps if keep_interval and step % keep_interval == 0}


def _has_no_manifest(audit: Audit, step: int) -> bool:
    """One that is damaged is told of as such."""
    return find_newest(audit.store, audit.names.checkpoint_manifest(step)) is None


def _check(audit: Audit, prefix: str, step: int, *, run_hash: str) -> CheckpointFact | None:
    what = f"manifest of checkpoint {step} ({audit.uri(prefix)})"
    first = f"{prefix}manifest.json"
    key = newest_revision(audit.store, first)
    data = audit.get(key, what=what)
    if key != first:
        audit.findings.note("CHECKPOINT_REPAIRED", f"checkpoint {step} was written anew: {audit.uri(key)}")
    if data is None:  # also if it was pruned just now
        return None
    fact: CheckpointFact | None = None
    with audit.reading("CHECKPOINT_CORRUPT", what):
        manifest = decode_object(data, what=what, reason="CHECKPOINT_CORRUPT")
        _check_identity(audit, step, manifest, run_hash=run_hash)
        if not isinstance(manifest["chain_hash"], str) or not isinstance(manifest.get("lineage", 0), int):
            raise CorruptObjectError("chain_hash or lineage is none", reason="CHECKPOINT_CORRUPT")
        objects = manifest["objects"]
        problems = [audit.object_problem(item["key"], item["size_bytes"], item["sha256"]) for item in objects]
        if any(problems) and audit.store.head(key) is None:
            return None  # pruned meanwhile, its manifest first
        for problem in filter(None, problems):
            audit.object_violation("CHECKPOINT", f"checkpoint {step}", problem)
        fact = CheckpointFact(
            step=step,
            chain_hash=manifest["chain_hash"],
            lineage=manifest.get("lineage", 0),
            manifest_sha256=hashlib.sha256(data).hexdigest(),
            is_repaired=key != first,
            files={} if any(problems) else {str(item["name"]): (item["key"], item["size_bytes"]) for item in objects},
        )
    return fact


def _check_identity(audit: Audit, step: int, manifest: Mapping[str, Any], *, run_hash: str) -> None:
    expected = {"run_uid": audit.names.uid, "run_hash": run_hash, "step": step}
    for field, wanted in expected.items():
        if manifest[field] != wanted:
            audit.findings.violation(
                "CHECKPOINT_MISNAMED", f"checkpoint {step} says {field} = {manifest[field]!r}, not {wanted!r}"
            )
