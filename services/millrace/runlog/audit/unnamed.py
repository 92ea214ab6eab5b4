"""What nobody names: objects that were added to a run. Behind its seal nothing may be new but two kinds of records.

named       by a header, a seal, or a manifest that counts
left over   listed by the seal and named by nobody: of writers that died, or made it again. No reader looks there
new         neither: somebody has added it
"""

import functools
import hashlib
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.runlog.audit.findings import Audit
from millrace.runlog.audit.named import kind_of
from millrace.runlog.names import Deployment
from millrace.runlog.records.epochs import latest_epoch
from millrace.runlog.records.sealed import Seal

_AT_ONCE = 16  # objects fetched at once
_SHOWN = 8
_PLACES = ("run.json", "epochs/", "generations/", "intents/", "events/", "policies/", "policy-files/", "checkpoints/")
_PLACES += ("scores/", "reopened/", "seals/", "attestations/", "batches/", "rollouts/", "token_logs/", "quarantine/")
"""Beginnings of the keys of a run, behind its prefix."""


def check_unnamed(
    audit: Audit, *, seal: Seal | None, key: str, blind: Collection[int], closing: batch_pb2.BatchHeader | None
) -> None:
    """Name every object of the run that is not accounted for.

    `seal` is that of its present end, `key` its own. Of the steps `blind` the headers cannot be read. `closing` is the
    closing header.
    """
    late = _Late(audit, seal, closing)
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
        elif own.startswith("reopened/") or late.may_be(own):
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


class _Late:
    """What may come behind the seal of a run that failed or was cancelled, by itself.

    Nobody waits for its trainer, which may write what it had in hand: versions, checkpoints and log-probs of committed
    steps behind the newest that the seal has. And `run resume` of a failed run may have died behind its intent.
    """

    def __init__(self, audit: Audit, seal: Seal | None, closing: batch_pb2.BatchHeader | None) -> None:
        self._audit = audit
        self._state = "SUCCEEDED" if seal is None or closing is None else seal.state
        self._closing = closing
        sealed = [] if seal is None else [*seal.objects, *(seal.others or ())]
        whole = [own for own in sealed if own.endswith("/manifest.json") or own.startswith("token_logs/")]
        self._newest = max(filter(None, map(_version_of, whole)), default=("0000", -1))
        self._newest_by_step: dict[str, int] = {}
        for folder, step in filter(None, map(_step_of_trainer, whole)):
            self._newest_by_step[folder] = max(self._newest_by_step.get(folder, -1), step)

    def may_be(self, own: str) -> bool:
        """Return whether the object under a key behind the run's prefix may have come by itself."""
        if self._closing is None or self._state == "SUCCEEDED":
            return False
        if own.startswith("policy-files/"):
            epoch = latest_epoch(self._audit.store, self._audit.names, "trainer")
            return own.startswith(f"policy-files/e{epoch}-")  # one that starts writes them before all else
        if version := _version_of(own):
            lineage, newest = self._newest
            return version[0] == lineage and newest < version[1] <= self._closing.step
        if place := _step_of_trainer(own):
            folder, step = place
            newest = self._newest_by_step.get(folder, -1)
            if folder == "token_logs":
                return newest <= step < self._closing.step  # one trainer writes several of a step
            return newest < step <= self._closing.step
        if self._state != "FAILED":
            return False
        return self._is_resumed if own.startswith("epochs/orchestrator/") else self._asks_to_resume(own)

    @functools.cached_property
    def _is_resumed(self) -> bool:
        root, intents = self._audit.names.root, self._audit.store.list(self._audit.names.intents)
        return any(self._asks_to_resume(info.key.removeprefix(root)) for info in intents)

    def _asks_to_resume(self, own: str) -> bool:
        """Return whether this is an intent that asks to open the present end again."""
        names, closing = self._audit.names, self._closing
        if closing is None or not own.startswith("intents/"):
            return False
        header = self._audit.get(names.batch_header(closing.step, closing.revision), what="closing header")
        data = self._audit.get(names.root + own, what="intent")
        if header is None or data is None:
            return False
        try:
            asked = decode_object(data, what="intent", reason="INTENT_CORRUPT")
        except CorruptObjectError:
            return False  # told where intents are read
        payload, wanted = asked.get("payload"), hashlib.sha256(header).hexdigest()
        return asked.get("kind") == "reopen" and isinstance(payload, dict) and payload.get("closing_sha256") == wanted


def _version_of(own: str) -> tuple[str, int] | None:
    """Return lineage and version of the policy whose object lies under a key."""
    place = re.match(r"policies/([0-9]+)-([0-9]+)/", own)
    return None if place is None else (place[1], int(place[2]))


def _step_of_trainer(own: str) -> tuple[str, int] | None:
    """Return the folder and the step of the checkpoint or the log-probs under a key."""
    place = re.match(r"(checkpoints|token_logs)/([0-9]+)/", own)
    return None if place is None else (place[1], int(place[2]))


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
