"""What nobody names: objects that were added to a run. Behind its seal nothing may be new but two kinds of records.

named       by a header, a seal, or a manifest that counts
left over   listed by the seal and named by nobody: of writers that died, or made it again. No reader looks there
new         neither: somebody has added it
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog.audit.findings import Audit
from millrace.runlog.audit.named import kind_of
from millrace.runlog.names import Deployment
from millrace.runlog.records.sealed import Seal

_AT_ONCE = 16  # objects fetched at once
_SHOWN = 8
_PLACES = ("run.json", "epochs/", "generations/", "intents/", "events/", "policies/", "policy-files/", "checkpoints/")
_PLACES += ("scores/", "reopened/", "seals/", "attestations/", "batches/", "rollouts/", "token_logs/", "quarantine/")
"""Beginnings of the keys of a run, behind its prefix."""
_BY_TRAINER = ("policies/", "policy-files/", "checkpoints/", "token_logs/")
"""What a trainer may still write when its run has failed or was cancelled: nobody waits for it then."""
_BY_RESUME = ("intents/", "epochs/orchestrator/")
"""What `run resume` of a failed run writes before the record of the reopening: it may have died in between."""


def check_unnamed(audit: Audit, *, seal: Seal | None, key: str, blind: Collection[int]) -> None:
    """Name every object of the run that is not accounted for.

    `seal` is that of its present end, `key` its own. Of the steps `blind` the headers cannot be read.
    """
    late = _may_come_late(seal)
    left_over: list[str] = []
    for info in audit.store.list(audit.names.root):
        own = info.key.removeprefix(audit.names.root)
        if info.key == audit.names.tombstone:
            audit.findings.violation(
                "TOMBSTONE", f"{audit.uri(info.key)} says that the run is being deleted, and nothing deletes runs"
            )
        elif not own.startswith(_PLACES) or (own.startswith("run.json") and own != "run.json"):
            audit.findings.violation("OBJECT_UNNAMED", f"{audit.uri(info.key)} is no object of a run")
        elif info.key in audit.named or own == "run.json" or own.startswith(("attestations/", "scores/")):
            continue  # who names it is compared with it
        elif _step_of(own) in blind:
            continue  # of a header that cannot be read
        elif own.startswith("quarantine/"):
            _check_quarantined(audit, info.key, info.size_bytes)
        elif seal is None or seal.others is None or info.key == key:
            continue  # it goes on, so that what is new is named by the next header or by the seal
        elif own in seal.others:
            if info.size_bytes != seal.others[own]:
                audit.findings.violation(
                    "OBJECT_CHANGED",
                    f"{audit.uri(info.key)} has {info.size_bytes} bytes, and had {seal.others[own]} at the seal",
                )
            left_over.append(own)
        elif own.startswith(("reopened/", *late)):
            audit.findings.note("WRITTEN_BEHIND_SEAL", f"{audit.uri(info.key)} came behind the seal of the run")
        else:
            audit.findings.violation(
                f"{kind_of(own) or 'OBJECT'}_UNNAMED",
                f"{audit.uri(info.key)} is named by no header and not by the seal: it was added behind the end",
            )
    if left_over:
        shown = ", ".join(left_over[:_SHOWN]) + (f" and {len(left_over) - _SHOWN} more" if left_over[_SHOWN:] else "")
        audit.findings.note("LEFT_OVER", f"nothing names {shown}, which the seal lists: left by writers that died")
    if seal is not None and seal.others is None:
        audit.findings.not_seen(
            "UNNAMED_OBJECTS", "the seal does not list what nobody names: objects that were added were not looked for"
        )


def check_other_names(audit: Audit, *, own: Collection[str]) -> None:
    """No name of the deployment but the run's `own` (keys) leads to it; reads every one."""
    deployment = Deployment(audit.names.prefix)
    uid = audit.names.uid.encode()

    def leads_here(key: str) -> bool:
        try:
            return audit.store.get(key, max_bytes=1 << 10).strip() == uid
        except (NotFoundError, CorruptObjectError):
            return False  # the audit of its own run tells of it

    for prefix, check in ((deployment.names_prefix, "NAME"), (deployment.requests_prefix, "REQUEST")):
        others = [info.key for info in audit.store.list(prefix) if info.key not in own]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="audit-names") as pool:
            for key, leads in zip(others, pool.map(leads_here, others), strict=True):
                if leads:
                    audit.findings.violation(
                        f"{check}_UNNAMED", f"{audit.uri(key)} leads to this run, whose run.json names another"
                    )


def _may_come_late(seal: Seal | None) -> tuple[str, ...]:
    """Beginnings of the keys of what may come behind a seal by itself."""
    if seal is None or seal.state == "SUCCEEDED":
        return ()
    return (*_BY_TRAINER, *_BY_RESUME) if seal.state == "FAILED" else _BY_TRAINER


def _step_of(own: str) -> int | None:
    """Return the step whose batch or archive lies under a key."""
    folder, _, rest = own.partition("/")
    step = rest.partition("/")[0]
    return int(step) if folder in ("batches", "rollouts") and step.isdecimal() else None


def _check_quarantined(audit: Audit, key: str, size_bytes: int) -> None:
    """What `run repair` has set aside is named by its own hash."""
    if audit.is_deep and key.rpartition(".")[2] != audit.sha256(key, size_bytes)[:16]:
        audit.findings.violation("OBJECT_UNNAMED", f"{audit.uri(key)} is not what `run repair` sets aside")
    else:
        audit.findings.note("QUARANTINED", f"{audit.uri(key)} is what `run repair` set aside")
