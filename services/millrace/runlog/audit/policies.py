"""Published policies: every version once, none left out, named as they are stored."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from millrace.internal.v1 import batch_pb2
from millrace.runlog.audit.findings import Audit

_NAME = re.compile(r"(\d{4,})-(\d{8,})/")
_NEWEST = 8  # versions whose objects are looked for: older ones may have been retired


class PolicyCheck:
    """Lists the published versions first, and compares them with the headers once these are known."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._lineages: defaultdict[int, list[int]] = defaultdict(list)
        """version → its lineages, ascending."""
        self._has_manifest: set[int] = set()

    def scan(self) -> None:
        """Read every manifest."""
        audit, torn, manifests = self._audit, 0, {}
        for prefix in audit.store.list_prefixes(audit.names.policies):
            match = _NAME.fullmatch(prefix.removeprefix(audit.names.policies))
            if match is None:
                continue
            lineage, version = int(match[1]), int(match[2])
            if audit.store.head(f"{prefix}manifest.json") is None:
                torn += 1
                continue
            self._lineages[version].append(lineage)
            manifests[version, lineage] = prefix
        if torn:
            audit.findings.note(
                "POLICIES_TORN", f"{torn} policies were uploaded in part and never published; nobody reads them"
            )
        newest = sorted(manifests)[-_NEWEST:]
        for (version, lineage), prefix in sorted(manifests.items()):
            audit.progress(f"policy {version}")
            self._check(prefix, lineage, version, with_objects=(version, lineage) in newest)
        audit.report.num_policies = len(manifests)
        audit.report.num_lineages = len({lineage for _, lineage in manifests})

    def compare(self, *, first: int, next_step: int, closing: batch_pb2.BatchHeader | None) -> None:
        """Versions `first` to the newest without a gap, none without its batch, all of them where the run succeeded."""
        findings = self._audit.findings
        newest = max(self._lineages, default=first - 1)
        succeeded = closing is not None and closing.outcome == batch_pb2.RUN_OUTCOME_SUCCEEDED
        if closing is not None and closing.final_version != next_step:
            findings.violation(
                "FINAL_VERSION_WRONG",
                f"the closing header names version {closing.final_version} as the final one, behind {next_step} steps",
            )
        last = next_step if succeeded else newest
        for version in range(first, max(last, newest) + 1):
            if version not in self._lineages:
                findings.violation("POLICY_MISSING", f"version {version} was never published")
        for version in sorted(self._lineages):
            if not first <= version <= next_step:
                findings.violation(
                    "POLICY_WITHOUT_BATCH",
                    f"version {version} is published, but the committed steps end with {next_step - 1}",
                )
        self._compare_lineages()

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

    def _check(self, prefix: str, lineage: int, version: int, *, with_objects: bool) -> None:
        audit, what = self._audit, f"manifest of policy {lineage}-{version}"
        manifest = audit.get_json(
            f"{prefix}manifest.json", missing="POLICY_CORRUPT", corrupt="POLICY_CORRUPT", what=what
        )
        if manifest is None:
            return
        try:
            self._check_identity(manifest, lineage, version)
            if with_objects:
                objects = (item for encoding in manifest["encodings"] for item in encoding["objects"])
                for item in (*objects, *manifest["files"]):
                    if problem := audit.object_problem(item["key"], int(item["size_bytes"])):
                        audit.findings.violation("POLICY_OBJECT_MISSING", f"policy {lineage}-{version}: {problem}")
        except (KeyError, TypeError, ValueError) as error:
            audit.findings.violation("POLICY_CORRUPT", f"{what} ({audit.uri(prefix)}) is not readable: {error!r}")

    def _check_identity(self, manifest: Mapping[str, Any], lineage: int, version: int) -> None:
        expected = {"run_uid": self._audit.names.uid, "lineage": lineage, "version": version}
        wrong = {name: manifest[name] for name, wanted in expected.items() if manifest[name] != wanted}
        if wrong:
            self._audit.findings.violation(
                "POLICY_MISNAMED", f"the manifest of policy {lineage}-{version} says {json.dumps(wrong)}"
            )
