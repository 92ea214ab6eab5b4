"""Published policies: every version once, none left out, named as they are stored, their digests as they were told.

Nothing removes a version: later ones may be deltas against it, so every object of every version must be there.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.decoding import decode_object
from millrace.internal.v1 import batch_pb2
from millrace.runlog.audit.findings import MAX_PER_CHECK, Audit, gaps
from millrace.runlog.audit.named import NamedCheck
from millrace.runlog.records.listing import policy_at
from millrace.storage.commit_points import find_newest

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

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._lineages: defaultdict[int, list[int]] = defaultdict(list)
        """version → its lineages, ascending."""
        self.facts: dict[tuple[int, int], PolicyFact] = {}
        """By lineage and version: those whose manifests can be read."""
        self._objects: dict[str, str] = {}
        """What is wrong with an object, empty if nothing: files are shared by many versions."""

    def scan(self) -> None:
        """Read every manifest."""
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
        """Versions `first` to the newest without a gap, none without its batch, all of them where the run succeeded."""
        findings = self._audit.findings
        newest = min(max(self._lineages, default=first - 1), next_step)
        succeeded = closing is not None and closing.outcome == batch_pb2.RUN_OUTCOME_SUCCEEDED
        if closing is not None and closing.final_version != next_step:
            findings.violation(
                "FINAL_VERSION_WRONG",
                f"the closing header names version {closing.final_version} as the final one, behind {next_step} steps",
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

    def compare_told(self, told: Mapping[tuple[int, int], Iterable[tuple[str, str]]], named: NamedCheck) -> None:
        """Compare with what events and headers said of a version: digest and sha256 of its manifest, hex."""
        names, findings = self._audit.names, self._audit.findings
        for (lineage, version), sayings in sorted(told.items()):
            if lineage not in self._lineages.get(version, ()):
                findings.violation(
                    "POLICY_MISSING",
                    f"an event says that version {version} of lineage {lineage} was published, and its manifest does "
                    "not exist",
                )
            for digest, sha256 in sayings:
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
        fact = self.facts.get((lineage, version))
        if fact is not None and digest and digest != fact.digest:
            self._audit.findings.violation(
                "POLICY_DIGEST_MISMATCH",
                f"policy {lineage}-{version} has digest {fact.digest[:16]}…, {by} says {digest[:16]}…",
            )

    def _compare_lineages(self) -> None:
        findings, highest = self._audit.findings, 0
        for version, lineages in sorted(self._lineages.items()):
            if len(lineages) > 1:
                findings.note(
                    "POLICY_SUPERSEDED", f"version {version} exists in the lineages {lineages}: the newest one counts"
                )
            if max(lineages) < highest:
                findings.violation(
                    "LINEAGE_BACK",
                    f"version {version} is of lineage {max(lineages)}, behind a version of lineage {highest}",
                )
            highest = max(highest, *lineages)

    def _compare_bases(self) -> None:
        """Deltas are against what is published under that version, and an anchor is whole."""
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
        """Read the manifest that counts: the newest successor, whatever became of those before it, else the first."""
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
            self._check_objects(manifest, what)
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

    def _check_objects(self, manifest: Mapping[str, Any], what: str) -> None:
        named = [item for encoding in manifest["encodings"] for item in encoding["objects"]]
        for item in (*named, *manifest["files"]):
            problem = self._objects.get(item["key"])
            if problem is None:
                problem = self._audit.object_problem(item["key"], item["size_bytes"], item["sha256"])
                self._objects[item["key"]] = problem
            if problem:
                self._audit.object_violation("POLICY", what.removeprefix("manifest of "), problem)

    def _check_digest(self, manifest: Mapping[str, Any], what: str) -> None:
        """The digest of the whole follows from those of the tensors, as `policies.digest` makes it."""
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
        expected = {"run_uid": self._audit.names.uid, "lineage": lineage, "version": version}
        wrong = {name: manifest[name] for name, wanted in expected.items() if manifest[name] != wanted}
        if wrong:
            self._audit.findings.violation(
                "POLICY_MISNAMED", f"the manifest of policy {lineage}-{version} says {json.dumps(wrong)}"
            )
