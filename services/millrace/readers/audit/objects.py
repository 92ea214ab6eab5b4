"""Checkpoints: each proves the batches that it was trained on, its objects are there, and none is missing."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.internal.v1 import batch_pb2
from millrace.readers.audit.events import EventClaims
from millrace.readers.audit.findings import MAX_PER_CHECK, Audit, RetirementCheck, gaps
from millrace.readers.audit.named import ReferencedObjects
from millrace.runlog.catalogue import (
    BASE_MANIFEST,
    CHAIN_POINT,
    EVENT_ARCHIVE,
    POLICY_MANIFEST,
    TOKEN_LOG,
    KeptAs,
)
from millrace.runlog.records.run_record import checkpoint_at, list_objects, policy_at
from millrace.runlog.redis.entry import Entry, id_order
from millrace.storage.base import find_newest, newest_revision


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFact:
    """What the audit keeps of a committed checkpoint."""

    step: int
    chain_hash: str
    lineage: int
    manifest_sha256: str
    is_repaired: bool
    """A later manifest replaces the first one."""
    files: Mapping[str, tuple[str, int]]
    """Key and bytes by name; empty if one of them is not there."""


def check_checkpoints(audit: Audit, *, run_hash: str) -> list[CheckpointFact]:
    """Check manifests and objects of all committed checkpoints; return facts of those that can be read, oldest first.

    `run_hash` is what the manifests must name.
    """
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
    """Report each checkpoint k that was not trained on the batches up to k - 1, by its chain hash.

    `facts` are the committed checkpoints, and `chains` has the chain hash after each step.
    """
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


def check_points(audit: Audit, chains: Mapping[int, bytes], named: ReferencedObjects) -> None:
    """Report each chain point that says something else than the headers up to its step.

    `chains` has the chain hash after each step, `named` what the headers name.
    """
    for _, key, _, point in audit.read_kind(CHAIN_POINT):
        if point is None or (chain := chains.get(point.step)) is None:
            continue  # not readable, or after a header that is not there: both are reported
        wrong = next((own for own, sha256 in point.page.objects.items() if named.sha256_of(own) != sha256.hex()), None)
        if point.chain_hash != chain:
            problem = f"the chain {point.chain_hash.hex()[:16]}…, the headers give {chain.hex()[:16]}…"
        elif wrong is not None:
            problem = f"a sha256 of {wrong} that no header names"
        else:
            continue
        audit.findings.violation("CHAIN_POINT_WRONG", f"{audit.uri(key)} says that step {point.step} has {problem}")


def compare_saved(
    audit: Audit,
    facts: Sequence[CheckpointFact],
    saved: Mapping[int, frozenset[str]],
    *,
    kept: tuple[int | None, int | None],
    base_step: int,
    retired: RetirementCheck,
) -> set[int]:
    """Report saved checkpoints that are missing although retention keeps them, or were changed.

    Return the removed steps. `facts` are those that are there. `saved` are the manifests' hashes by step, as events and
    seals name them; `kept` are `keep_last` and `keep_interval`: retention keeps the newest `keep_last` of those that
    were saved, and the multiples of `keep_interval`. A missing checkpoint must be `retired`. A run without such records
    was pruned before there were any, so that its config decides. `base_step` is the checkpoint that a fork began with,
    0 for none.
    """
    there = {fact.step: fact for fact in facts}
    known = sorted({*there, *saved, *([base_step] if base_step else ())})
    if retired.has(KeptAs.CHECKPOINTS):
        keys = {step: audit.names.checkpoint_manifest(step) for step in known if step not in there}
        promised = {step for step, key in keys.items() if not _has_no_manifest(audit, step) or not retired.covers(key)}
    else:
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
    """Return which of the steps (ascending) a run keeps checkpoints of, by its config.

    None for `keep_last` keeps all.
    """
    if keep_last is None:
        return set(steps)
    return set(steps[-keep_last:]) | {step for step in steps if keep_interval and step % keep_interval == 0}


def _has_no_manifest(audit: Audit, step: int) -> bool:
    """Return whether the checkpoint of a step has no manifest at all; a damaged one is reported as such elsewhere."""
    return find_newest(audit.store, audit.names.checkpoint_manifest(step)) is None


def _check(audit: Audit, prefix: str, step: int, *, run_hash: str) -> CheckpointFact | None:
    """Check the newest manifest under the `prefix` of a checkpoint, and its objects; return its facts.

    None if it is damaged, which is reported, or was removed meanwhile.
    """
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
    """Report a checkpoint's manifest that names another run, config or step."""
    expected = {"run_uid": audit.names.uid, "run_hash": run_hash, "step": step}
    for field, wanted in expected.items():
        if manifest[field] != wanted:
            audit.findings.violation(
                "CHECKPOINT_MISNAMED", f"checkpoint {step} says {field} = {manifest[field]!r}, not {wanted!r}"
            )


# The archived events, object by object, so that a damaged one hides no other.


def read_archives(audit: Audit) -> list[Entry]:
    """Return every archived event that can be read, each id once, in any order.

    Two different events with one id are a violation, and so is a damaged archive.
    """
    found: dict[str, Entry] = {}
    for _, key, _, entries in audit.read_kind(EVENT_ARCHIVE):
        if entries is None:
            continue
        audit.progress(f"events {key.rpartition('/')[2]}")
        with audit.reading("EVENT_ARCHIVE_CORRUPT", audit.uri(key)):
            _check_name(audit, key, entries)
            for entry in entries:
                if found.setdefault(entry.id, entry).h != entry.h:
                    audit.findings.violation(
                        "EVENT_ARCHIVE_CHANGED",
                        f"{audit.uri(key)} has another event {entry.id} than an archive that overlaps it: one was "
                        "changed",
                    )
    return list(found.values())


def _check_name(audit: Audit, key: str, entries: list[Entry]) -> None:
    """Report an archive of events whose key names other ids than it has.

    CorruptObjectError if they are not in order.
    """
    ids = [id_order(entry.id) for entry in entries]
    if not entries or ids != sorted(set(ids)):
        raise CorruptObjectError("its events are not in the order of their ids", reason="EVENT_ARCHIVE_CORRUPT")
    if audit.names.archived_events(entries[0].id, entries[-1].id) != key:
        audit.findings.violation(
            "EVENT_ARCHIVE_CHANGED", f"{audit.uri(key)} holds the events {entries[0].id} to {entries[-1].id}"
        )


# Token logs: each is what its event says.


def check_token_logs(audit: Audit, claims: EventClaims, chains: Mapping[int, bytes], retired: RetirementCheck) -> None:
    """Compare the trainer's token logs with the events that name them: their size, in a deep audit their bytes.

    `claims` are what events say. One that is missing must be covered by `retired`. One that no event names has to be of
    the run, of the step and lineage in its key, and of that step's chain hash, which `chains` has.
    """
    for own, expected in sorted(claims.token_logs.items()):
        if TOKEN_LOG.parse(own) is None:
            audit.findings.violation("TOKEN_LOG_MISNAMED", f"an event names {own[:200]!r}, which is no token log")
            continue
        key = audit.names.root + own
        problems = [audit.object_problem(key, size_bytes, sha256) for sha256, size_bytes in sorted(expected)]
        if any(problems) and audit.store.head(key) is None and retired.covers(key):
            continue
        for problem in filter(None, problems):
            audit.object_violation("TOKEN_LOG", "log-probs of the trainer", problem)
    unclaimed = [own for own in list_objects(audit.store, audit.names, TOKEN_LOG) if own not in claims.token_logs]
    for own in unclaimed:
        _check_unclaimed(audit, own, chains)
    if unclaimed:
        where = audit.uri(audit.names.root + unclaimed[0])
        audit.findings.not_seen(
            "TOKEN_LOGS", f"no event names {len(unclaimed)} token logs, such as {where}: they were not compared"
        )


def _check_unclaimed(audit: Audit, own: str, chains: Mapping[int, bytes]) -> None:
    """Report a token log that no event names (`own`: its key without the run's prefix) unless it is of what its key
    says.
    """
    place, where = TOKEN_LOG.parse(own) or {}, audit.uri(audit.names.root + own)
    data = audit.get(audit.names.root + own, what="token log")
    with audit.reading("TOKEN_LOG_CORRUPT", where):
        log = None if data is None else TOKEN_LOG.decode(data, where=where)
        chain = chains.get(int(place["step"]))
        wanted = (audit.names.uid, place["step"], place["lineage"], chain)
        if log is not None and (log.run_uid, log.step, log.lineage, chain and log.chain_hash) != wanted:
            audit.findings.violation(
                "TOKEN_LOG_MISNAMED", f"{where} holds log-probs of another step, or of another run"
            )


# Published policies: every version once, none left out, named as they are stored, their digests as events have them.
#
# Manifests stay as long as the run. An object of a version that is missing was retired, or somebody has taken it.

_CORRUPT = "POLICY_CORRUPT"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFact:
    """What the audit keeps of a published version."""

    lineage: int
    version: int
    key: str
    """Of the manifest that counts."""
    sha256: str
    """sha256 of the manifest's bytes."""
    digest: str
    has_full: bool
    bases: tuple[tuple[int, str], ...]
    """Version and digest that its deltas are against."""
    anchor: int
    is_repaired: bool


class PolicyCheck:
    """Lists the published versions first, and compares them with the headers once these are known."""

    def __init__(self, audit: Audit, retired: RetirementCheck) -> None:
        """Make a check of published policies, which `scan` reads; a missing object must be covered by `retired`."""
        self._audit = audit
        self._retired = retired
        self.retired: set[tuple[int, int]] = set()
        """Lineage and version of those that lack an object that was retired."""
        self._lineages: defaultdict[int, list[int]] = defaultdict(list)
        """version → its lineages, ascending."""
        self.facts: dict[tuple[int, int], PolicyFact] = {}
        """By lineage and version: those whose manifests can be read."""
        self._objects: dict[str, str] = {}
        """What is wrong with an object, empty if nothing: files are shared by many versions."""
        self._bases: dict[str, str] = {}
        """Digest of the weights by the key of a manifest that adapters name as their base; empty if it is damaged."""

    def scan(self) -> None:
        """Read every version's manifest and check its objects.

        Write the numbers of versions and lineages into the report.
        """
        audit, torn = self._audit, 0
        for prefix in audit.store.list_prefixes(audit.names.policies):
            if (place := policy_at(audit.names, prefix)) is None:
                audit.findings.violation(_CORRUPT, f"{audit.uri(prefix)} is no version's place")
                continue
            version, lineage = place
            if (key := find_newest(audit.store, f"{prefix}manifest.json")) is None:
                torn += 1
                continue
            self._lineages[version].append(lineage)
            audit.progress(f"policy {version}")
            self._check(key, lineage, version, is_repaired=key != f"{prefix}manifest.json")
        if torn:
            audit.findings.note(
                "POLICIES_TORN", f"{torn} policies were uploaded in part and never published; nobody reads them"
            )
        audit.report.num_policies = sum(map(len, self._lineages.values()))
        audit.report.num_lineages = len({lineage for found in self._lineages.values() for lineage in found})

    def compare(self, *, first: int, next_step: int, closing: batch_pb2.BatchHeader | None) -> None:
        """Report gaps in the versions from `first` on, versions without a batch, and wrong lineages and bases.

        `next_step` is the step after the last committed one, `closing` the closing header, None while the run goes on.
        A run that succeeded must have all versions up to `next_step`.
        """
        findings = self._audit.findings
        # Versions after the committed steps are reported below, and are no reason to miss those before them.
        newest = min(max(self._lineages, default=first - 1), next_step)
        succeeded = closing is not None and closing.outcome == batch_pb2.RUN_OUTCOME_SUCCEEDED
        if closing is not None and closing.final_version != next_step:
            findings.violation(
                "FINAL_VERSION_WRONG",
                f"the closing header names version {closing.final_version} as the final one, after {next_step} steps",
            )
        for missing in gaps(self._lineages, first, (next_step if succeeded else newest) + 1):
            for version in missing[:MAX_PER_CHECK]:
                findings.violation("POLICY_MISSING", f"version {version} was never published")
            if missing.stop - missing.start > MAX_PER_CHECK:
                findings.violation("POLICY_MISSING", f"versions up to {missing[-1]} were never published either")
        for version in sorted(self._lineages):
            if not first <= version <= next_step:
                findings.violation(
                    "POLICY_WITHOUT_BATCH",
                    f"version {version} is published, but the committed steps end with {next_step - 1}",
                )
        self._compare_lineages()
        self._compare_bases()

    def compare_claims(
        self, claims: Mapping[tuple[int, int], Iterable[tuple[str, str]]], named: ReferencedObjects
    ) -> None:
        """Report where a version's manifest differs from what events and headers say of it.

        `claims` has by lineage and version the digests and the manifest's sha256 (hex) of events; `named` has
        those of headers, and gets the manifests that a newer revision replaces.
        """
        names, findings = self._audit.names, self._audit.findings
        for (lineage, version), claimed in sorted(claims.items()):
            if lineage not in self._lineages.get(version, ()):
                findings.violation(
                    "POLICY_MISSING",
                    f"an event says that version {version} of lineage {lineage} was published, and its manifest does "
                    "not exist",
                )
            for digest, sha256 in claimed:
                self._compare_digest(lineage, version, digest, "its event")
                fact = self.facts.get((lineage, version))
                if fact is not None and not fact.is_repaired and sha256 and sha256 != fact.sha256:
                    findings.violation(
                        "POLICY_CHANGED",
                        f"the manifest of policy {lineage}-{version} has sha256 {fact.sha256[:16]}…, its event "
                        f"names {sha256[:16]}…",
                    )
        for (lineage, version), fact in sorted(self.facts.items()):
            key = names.policy_manifest(lineage, version).removeprefix(names.root)
            self._compare_digest(lineage, version, named.digest_of(key), "a header")
            if fact.is_repaired:
                named.repaired.add(key)

    def _compare_digest(self, lineage: int, version: int, digest: str, by: str) -> None:
        """Report a version whose digest is not the one that `by` (in words) names; an empty digest is not compared."""
        fact = self.facts.get((lineage, version))
        if fact is not None and digest and digest != fact.digest:
            self._audit.findings.violation(
                "POLICY_DIGEST_MISMATCH",
                f"policy {lineage}-{version} has digest {fact.digest[:16]}…, {by} says {digest[:16]}…",
            )

    def _compare_lineages(self) -> None:
        """Note versions that several lineages published; report a version of an older lineage than one before it."""
        findings, highest = self._audit.findings, 0
        for version, lineages in sorted(self._lineages.items()):
            if len(lineages) > 1:
                findings.note(
                    "POLICY_SUPERSEDED", f"version {version} exists in the lineages {lineages}: the newest one counts"
                )
            if max(lineages) < highest:
                findings.violation(
                    "LINEAGE_BACK",
                    f"version {version} is of lineage {max(lineages)}, after a version of lineage {highest}",
                )
            highest = max(highest, *lineages)

    def _compare_bases(self) -> None:
        """Report deltas that are not against the published version of their base, and anchors without a full copy."""
        for (lineage, version), fact in sorted(self.facts.items()):
            what = f"policy {lineage}-{version}"
            for base, digest in fact.bases:
                found = self.facts.get((lineage, base))
                if found is None:
                    self._audit.findings.violation(
                        "POLICY_BASE_MISSING", f"{what} is a delta against version {base}, which cannot be read"
                    )
                elif found.digest != digest:
                    self._audit.findings.violation(
                        "POLICY_DIGEST_MISMATCH",
                        f"{what} is a delta against digest {digest[:16]}…, version {base} has {found.digest[:16]}…",
                    )
            anchor = self.facts.get((lineage, fact.anchor))
            if anchor is None or not anchor.has_full:
                self._audit.findings.violation(
                    "POLICY_BASE_MISSING", f"{what} names version {fact.anchor} as its anchor, which is no full copy"
                )

    def _check(self, key: str, lineage: int, version: int, *, is_repaired: bool) -> None:
        """Read the manifest under `key`, the newest revision, check it and its objects, and keep its facts."""
        audit, what = self._audit, f"manifest of policy {lineage}-{version}"
        data = audit.get(key, missing="POLICY_MISSING", what=what)
        if is_repaired:
            audit.findings.note("POLICY_REPAIRED", f"policy {lineage}-{version} was published anew: {audit.uri(key)}")
        if data is None:
            return
        with audit.reading(_CORRUPT, f"{what} ({audit.uri(key)})"):
            manifest = decode_object(data, what=f"{what} ({audit.uri(key)})", reason=_CORRUPT)
            self._check_identity(manifest, lineage, version)
            self._check_digest(manifest, what)
            self._check_objects(manifest, what, place=(lineage, version))
            if adapter := manifest.get("adapter"):
                self._check_adapter(what, str(adapter["base_key"]), str(adapter["base_digest"]))
            encodings = manifest["encodings"]
            self.facts[lineage, version] = PolicyFact(
                lineage=lineage,
                version=version,
                key=key,
                sha256=hashlib.sha256(data).hexdigest(),
                digest=str(manifest["digest"]),
                has_full=any(encoding["base"] is None for encoding in encodings),
                bases=tuple((int(e["base"]), str(e["base_digest"])) for e in encodings if e["base"] is not None),
                anchor=int(manifest["anchor"]),
                is_repaired=is_repaired,
            )

    def _check_objects(self, manifest: Mapping[str, Any], what: str, *, place: tuple[int, int]) -> None:
        """Check the objects that a manifest names, each once.

        Note the version (`place`) as retired if one was retired.
        """
        named = [item for encoding in manifest["encodings"] for item in encoding["objects"]]
        for item in (*named, *manifest["files"]):
            problem = self._objects.get(item["key"])
            if problem is None:
                problem = self._audit.object_problem(item["key"], item["size_bytes"], item["sha256"])
                self._objects[item["key"]] = problem
            if problem and self._audit.store.head(item["key"]) is None and self._retired.covers(item["key"]):
                self.retired.add(place)
            elif problem:
                self._audit.object_violation("POLICY", what.removeprefix("manifest of "), problem)

    def _check_adapter(self, what: str, base_key: str, base_digest: str) -> None:
        """Report an adapter whose base is not there, or has another digest than the adapter's manifest says.

        `what` names that manifest. The base is version 0 of the run or, in a fork, a copy under a prefix of its own.
        """
        if base_key not in self._bases:
            self._bases[base_key] = self._read_base(base_key, what)
        found = self._bases[base_key]
        if found and found != base_digest:
            self._audit.findings.violation(
                "POLICY_DIGEST_MISMATCH",
                f"the {what} is on a base of digest {base_digest[:16]}…, {self._audit.uri(base_key)} has {found[:16]}…",
            )

    def _read_base(self, base_key: str, what: str) -> str:
        """Return the digest of the base under a key, of its newest revision; empty, with a violation, if it cannot be
        read.

        The objects of a fork's copy are checked, too; those of a version are checked with the version.
        """
        audit, own = self._audit, base_key.removeprefix(self._audit.names.root)
        is_copy = BASE_MANIFEST.parse(own) is not None
        if not audit.is_own(base_key) or not (is_copy or POLICY_MANIFEST.parse(own)):
            audit.findings.violation("POLICY_MISNAMED", f"the {what} names {base_key[:200]!r} as its base")
            return ""
        newest = newest_revision(audit.store, base_key)
        audit.is_own(newest)  # which notes it as named
        name = "manifest of the adapters' base"
        data = audit.get(newest, missing="POLICY_BASE_MISSING", what=name)
        digest = ""
        if data is not None:
            with audit.reading(_CORRUPT, f"{name} ({audit.uri(newest)})"):
                manifest = decode_object(data, what=f"{name} ({audit.uri(newest)})", reason=_CORRUPT)
                if is_copy:
                    self._check_digest(manifest, name)
                    self._check_objects(manifest, name, place=(0, 0))
                digest = str(manifest["digest"])
        return digest

    def _check_digest(self, manifest: Mapping[str, Any], what: str) -> None:
        """Report a violation unless a manifest's digest follows from those of its tensors.

        `what` names the manifest.
        """
        whole = hashlib.sha256()
        for tensor in sorted(manifest["tensors"], key=lambda tensor: tensor["name"]):
            shape = ",".join(map(str, tensor["shape"]))
            whole.update(f"{tensor['name']}\0{tensor['dtype']}\0{shape}\0{tensor['digest']}\n".encode())
        if whole.hexdigest() != manifest["digest"]:
            self._audit.findings.violation(
                "POLICY_DIGEST_MISMATCH",
                f"the {what} says digest {manifest['digest']!r:.18}…, its tensors give {whole.hexdigest()[:16]}…",
            )

    def _check_identity(self, manifest: Mapping[str, Any], lineage: int, version: int) -> None:
        """Report a manifest that names another run, lineage or version."""
        expected = {"run_uid": self._audit.names.uid, "lineage": lineage, "version": version}
        wrong = {name: manifest[name] for name, wanted in expected.items() if manifest[name] != wanted}
        if wrong:
            self._audit.findings.violation(
                "POLICY_MISNAMED", f"the manifest of policy {lineage}-{version} says {json.dumps(wrong)}"
            )
