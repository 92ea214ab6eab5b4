"""Checkpoints: each proves the batches that it was trained on, and its objects are there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.runlog.audit.findings import Audit


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFact:
    """What the audit keeps of a committed checkpoint."""

    step: int
    chain_hash: str


def check_checkpoints(audit: Audit, *, run_hash: str) -> list[CheckpointFact]:
    """Check manifests and objects of all committed checkpoints; returns them, oldest first."""
    facts: list[CheckpointFact] = []
    torn = 0
    prefixes = list(audit.store.list_prefixes(audit.names.checkpoints))
    for prefix in prefixes:
        name = prefix.removeprefix(audit.names.checkpoints).rstrip("/")
        if audit.store.head(f"{prefix}manifest.json") is None:
            torn += 1
            continue
        fact = _check(audit, prefix, name, run_hash=run_hash)
        if fact is not None:
            facts.append(fact)
    if torn:
        audit.findings.note(
            "CHECKPOINTS_TORN", f"{torn} checkpoints were uploaded in part and never committed; nobody reads them"
        )
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


def _check(audit: Audit, prefix: str, name: str, *, run_hash: str) -> CheckpointFact | None:
    what = f"manifest of checkpoint {name}"
    manifest = audit.get_json(f"{prefix}manifest.json", missing="", corrupt="CHECKPOINT_CORRUPT", what=what)
    if manifest is None:  # also if it was pruned just now
        return None
    try:
        fact = CheckpointFact(step=int(manifest["step"]), chain_hash=str(manifest["chain_hash"]))
        _check_identity(audit, name, manifest, run_hash=run_hash)
        problems = [audit.object_problem(item["key"], int(item["size_bytes"])) for item in manifest["objects"]]
        if any(problems) and audit.store.head(f"{prefix}manifest.json") is None:
            return None  # pruned meanwhile, its manifest first
        for problem in filter(None, problems):
            audit.findings.violation("CHECKPOINT_OBJECT_MISSING", f"checkpoint {name}: {problem}")
    except (KeyError, TypeError, ValueError) as error:
        audit.findings.violation("CHECKPOINT_CORRUPT", f"{what} ({audit.uri(prefix)}) is not readable: {error!r}")
        return None
    return fact


def _check_identity(audit: Audit, name: str, manifest: Mapping[str, Any], *, run_hash: str) -> None:
    expected = {"run_uid": audit.names.uid, "run_hash": run_hash, "step": int(name)}
    for field, wanted in expected.items():
        if manifest[field] != wanted:
            audit.findings.violation(
                "CHECKPOINT_MISNAMED", f"checkpoint {name} says {field} = {manifest[field]!r}, not {wanted!r}"
            )
