"""What the run is: run.json fits its hash, and the run's name and its request lead to it."""

import hashlib
import json
from collections.abc import Callable

from millrace.errors import InvalidSpecError
from millrace.runlog.audit.findings import Audit
from millrace.runlog.names import Deployment
from millrace.runlog.records.run_record import RunRecord


def check_identity(audit: Audit, record: RunRecord) -> set[str]:
    """Check a run.json that could be parsed against itself and the index of runs; returns the keys that lead to it."""
    findings, uid, where = audit.findings, audit.names.uid, audit.uri(audit.names.run_json)
    if record.uid not in ("", uid):
        findings.violation("RUN_JSON_CHANGED", f"{where} is that of run {record.uid!r}")
    if record.config is not None:
        text = json.dumps(record.config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        with audit.reading("RUN_JSON_CHANGED", where):
            if (found := hashlib.sha256(text.encode()).hexdigest()) != record.run_hash:
                findings.violation(
                    "RUN_JSON_CHANGED", f"the config in {where} has the hash {found}, not {record.run_hash}"
                )
    deployment = Deployment(audit.names.prefix)
    own = {_check_index(audit, "NAME", record.name, deployment.name_object)}
    if record.request_id:
        own.add(_check_index(audit, "REQUEST", record.request_id, deployment.request_object))
    return own


def _check_index(audit: Audit, kind: str, value: str, key_of: Callable[[str], str]) -> str:
    """The object that leads from a name or a request to the run."""
    try:
        key = key_of(value)
    except InvalidSpecError as error:
        audit.findings.violation("RUN_JSON_CORRUPT", f"{audit.uri(audit.names.run_json)}: {error}")
        return ""
    data = audit.get(key, missing=f"{kind}_MISSING", what=f"the {kind.lower()} object of the run,")
    if data is not None and data != audit.names.uid.encode():
        audit.findings.violation(f"{kind}_CHANGED", f"{audit.uri(key)} leads to {data[:80]!r}, not to this run")
    return key


def read_kept(record: RunRecord) -> tuple[int | None, int | None]:
    """`keep_last` and `keep_interval` of the checkpoints; (None, None) keeps all, as where the config names nothing."""
    try:
        settings = (record.config or {})["trainer"]["ckpt"]
        keep_last, keep_interval = settings.get("keep_last"), settings.get("keep_interval")
    except (KeyError, TypeError, AttributeError):
        return None, None
    if not isinstance(keep_last, int) or keep_last < 1:
        return None, None
    return keep_last, keep_interval if isinstance(keep_interval, int) and keep_interval > 0 else None
