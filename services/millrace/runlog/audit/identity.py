"""What the run is: run.json fits its hash, and the run's name and its request lead to it."""

import hashlib
import json
from typing import Any

from millrace.errors import InvalidSpecError
from millrace.runlog.audit.findings import Audit
from millrace.runlog.names import Deployment


def check_identity(audit: Audit, document: dict[str, Any]) -> None:
    """Check a run.json that could be parsed against itself and against the index of runs."""
    findings, uid, where = audit.findings, audit.names.uid, audit.uri(audit.names.run_json)
    if document.get("uid", uid) != uid:
        findings.violation("RUN_JSON_CHANGED", f"{where} is that of run {document['uid']!r}")
    if "config" in document:
        text = json.dumps(document["config"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        with audit.reading("RUN_JSON_CHANGED", where):
            if (found := hashlib.sha256(text.encode()).hexdigest()) != document.get("run_hash"):
                findings.violation(
                    "RUN_JSON_CHANGED", f"the config in {where} has the hash {found}, not {document.get('run_hash')}"
                )
    deployment = Deployment(audit.names.prefix)
    _check_index(audit, "NAME", document.get("name"), deployment.name_object)
    if document.get("request_id"):
        _check_index(audit, "REQUEST", document["request_id"], deployment.request_object)


def _check_index(audit: Audit, kind: str, value: object, key_of: Any) -> None:
    """The object that leads from a name or a request to the run."""
    try:
        key = key_of(value if isinstance(value, str) else "")
    except InvalidSpecError as error:
        audit.findings.violation("RUN_JSON_CORRUPT", f"{audit.uri(audit.names.run_json)}: {error}")
        return
    data = audit.get(key, missing=f"{kind}_MISSING", what=f"the {kind.lower()} object of the run,")
    if data is not None and data != audit.names.uid.encode():
        audit.findings.violation(f"{kind}_CHANGED", f"{audit.uri(key)} leads to {data[:80]!r}, not to this run")


def read_kept(document: dict[str, Any]) -> tuple[int | None, int | None]:
    """`keep_last` and `keep_interval` of the checkpoints; (None, None) keeps all, as where the config names nothing."""
    try:
        settings = document["config"]["trainer"]["ckpt"]
        keep_last, keep_interval = settings.get("keep_last"), settings.get("keep_interval")
    except (KeyError, TypeError, AttributeError):
        return None, None
    if not isinstance(keep_last, int) or keep_last < 1:
        return None, None
    return keep_last, keep_interval if isinstance(keep_interval, int) and keep_interval > 0 else None
