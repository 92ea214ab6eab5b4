"""Small objects that headers and seals name by their sha256: all of them are there, and as they were named."""

import functools
import hashlib
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.readers.audit.findings import Audit, retires_checkpoints_only
from millrace.runlog.catalogue import POLICY_OBJECT, finding_at, is_place
from millrace.runlog.names import Deployment
from millrace.runlog.records.known import describe
from millrace.runlog.records.numbered import latest_epoch
from millrace.runlog.records.sealed import Seal

_AT_ONCE = 16  # objects fetched at once
_PROGRESS_EVERY = 256
MAX_NAMED_BYTES = 128 << 20
"""Largest object that is read because somebody names it; those that headers name have some megabytes at most."""


@dataclass(frozen=True, slots=True)
class _Named:
    sha256: str
    digest: str
    by: str


class ReferencedObjects:
    """Takes what is named, then compares each with the store."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._named: dict[str, _Named] = {}
        self.repaired: set[str] = set()
        """Manifests that a whole successor replaces: they may be damaged or gone."""
        self.pruned: set[str] = set()
        """What retention has removed."""

    def add_header(self, header: batch_pb2.BatchHeader) -> None:
        """Note the objects that a header names, with their hashes."""
        for ref in header.objects:
            self._add(ref.key, ref.sha256.hex(), ref.digest, f"header {header.step}")

    def add_seal(self, objects: Mapping[str, str], *, by: str) -> None:
        """Note the objects that a seal names: sha256 (hex) by key without the run's prefix.

        `by` names the seal in findings.
        """
        for key, sha256 in objects.items():
            self._add(key, sha256, "", by)

    def digest_of(self, key: str) -> str:
        """Return the digest of weights (hex) that a header names with a manifest's key; empty if none does.

        `key` is without the run's prefix.
        """
        named = self._named.get(key)
        return named.digest if named else ""

    def sha256_of(self, key: str) -> str:
        """Return the sha256 (hex) with which an object is named; empty if nothing names it.

        `key` is without the run's prefix.
        """
        named = self._named.get(key)
        return named.sha256 if named else ""

    def compare(self) -> None:
        """Read every named object, several at once; one that is missing, or has another hash, is a violation."""
        keys = sorted(self._named.keys() - self.pruned - self.repaired)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="audit-named") as pool:
            for first in range(0, len(keys), _PROGRESS_EVERY):
                self._audit.progress(f"object {first} of {len(keys)} that headers name")
                for found in pool.map(self._compare, keys[first : first + _PROGRESS_EVERY]):
                    if found is not None:
                        self._audit.findings.violation(*found)

    def _add(self, key: str, sha256: str, digest: str, by: str) -> None:
        """Note one named object; a key that is none of the run's, or a second hash for one key, is a violation."""
        kind = finding_at(key)
        before = self._named.get(key)
        if not kind or not self._audit.is_own(self._audit.names.root + key):
            self._audit.findings.violation("NAMED_UNKNOWN", f"{by} names {key[:200]!r}, which is no object of a run")
        elif before is None:
            self._named[key] = _Named(sha256, digest, by)
        elif before.sha256 != sha256:
            self._audit.findings.violation(
                "NAMED_TWICE", f"{before.by} and {by} name {key} with different hashes: one of the two was changed"
            )

    def _compare(self, key: str) -> tuple[str, str] | None:
        """Read one named object; return check and message of the violation, None if it has the hash."""
        audit, named, kind = self._audit, self._named[key], finding_at(key)
        full = audit.names.root + key
        try:
            info = audit.store.head(full)
            if info is not None and info.size_bytes > MAX_NAMED_BYTES:
                return f"{kind}_CHANGED", f"{audit.uri(full)} has {info.size_bytes} bytes, and {named.by} names it"
            found = describe(audit.names, key, audit.store.get(full, max_bytes=MAX_NAMED_BYTES))
        except NotFoundError:
            return f"{kind}_MISSING", f"{audit.uri(full)} does not exist, but {named.by} names it"
        except (CorruptObjectError, InvalidSpecError) as error:
            return "OBJECT_CORRUPT", f"{audit.uri(full)}, which {named.by} names: {error}"
        if found.sha256.hex() == named.sha256:
            return None
        return (
            f"{kind}_CHANGED",
            f"{audit.uri(full)} has sha256 {found.sha256.hex()[:16]}…, {named.by} names {named.sha256[:16]}…: it was "
            "changed, or the one that names it",
        )


# What nobody names: objects that were added to a run. After its seal nothing may be new but two kinds of records.
#
#     named        by a header, a seal, or a manifest that counts
#     left over    listed by the seal and named by nobody: of writers that died, or made it again; no reader looks there
#     new          neither: somebody has added it

_UNNAMED_AT_ONCE = 16  # objects fetched at once
_TRAINER_EPOCHS = "epochs/trainer/"
_SHOWN = 8


def check_unnamed(
    audit: Audit, *, seal: Seal | None, key: str, blind: Collection[int], closing: batch_pb2.BatchHeader | None
) -> None:
    """Report every object of the run that nothing accounts for: as a violation, or a note where it may be there.

    `seal` is that of the run's present end (None: it goes on), `key` the seal's whole key, `closing` the closing
    header. Of the steps `blind` the headers cannot be read.
    """
    late = _Late(audit, seal, closing)
    left_over: list[str] = []
    for info in audit.store.list(audit.names.root):
        own = info.key.removeprefix(audit.names.root)
        if info.key == audit.names.tombstone:
            audit.findings.violation(
                "TOMBSTONE", f"{audit.uri(info.key)} says that the run is being deleted, and its deletion has not ended"
            )
        elif not is_place(own):
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
            audit.findings.note("WRITTEN_BEHIND_SEAL", f"{audit.uri(info.key)} came after the seal of the run")
        else:
            audit.findings.violation(
                f"{finding_at(own) or 'OBJECT'}_UNNAMED",
                f"{audit.uri(info.key)} is named by no header and not by the seal: it was added after the end",
            )
    if left_over:
        shown = ", ".join(left_over[:_SHOWN]) + (f" and {len(left_over) - _SHOWN} more" if left_over[_SHOWN:] else "")
        audit.findings.note("LEFT_OVER", f"nothing names {shown}, which the seal lists: left by writers that died")
    if seal is not None and seal.others is None:
        audit.findings.not_seen(
            "UNNAMED_OBJECTS", "the seal does not list what nobody names: objects that were added were not looked for"
        )


def check_other_names(audit: Audit, *, own: Collection[str]) -> None:
    """Read every name and request of the deployment, and report each that leads to the run and is not one of `own`.

    `own` are the whole keys of the name and request that should.
    """
    deployment = Deployment(audit.names.prefix)
    uid = audit.names.uid.encode()

    def leads_here(key: str) -> bool:
        """Return whether the object under a key holds the run's uid."""
        try:
            return audit.store.get(key, max_bytes=1 << 10).strip() == uid
        except (NotFoundError, CorruptObjectError):
            return False  # the audit of that run reports it

    for prefix, check in ((deployment.names_prefix, "NAME"), (deployment.requests_prefix, "REQUEST")):
        others = [info.key for info in audit.store.list(prefix) if info.key not in own]
        with ThreadPoolExecutor(_UNNAMED_AT_ONCE, thread_name_prefix="audit-names") as pool:
            for key, leads in zip(others, pool.map(leads_here, others), strict=True):
                if leads:
                    audit.findings.violation(
                        f"{check}_UNNAMED", f"{audit.uri(key)} leads to this run, whose run.json names another"
                    )


class _Late:
    """What may come after the seal of a run by itself: most of it only if the run failed or was cancelled.

    Nobody waits for the trainer of such a run, which may write what it had in hand: versions, checkpoints and log-probs
    of committed steps after the newest that the seal has. And `run resume` of a failed run may die after its intent.
    """

    def __init__(self, audit: Audit, seal: Seal | None, closing: batch_pb2.BatchHeader | None) -> None:
        """Note what the seal lists, and which versions and steps of the trainer are the newest in it.

        Without a seal or a closing header nothing may come late.
        """
        self._audit = audit
        self._state = "SUCCEEDED" if seal is None or closing is None else seal.state
        self._closing = closing
        self._sealed = sealed = [] if seal is None else [*seal.objects, *(seal.others or ())]
        whole = [own for own in sealed if own.endswith("/manifest.json") or own.startswith("token_logs/")]
        self._newest = max(filter(None, map(_version_of, whole)), default=(0, -1))
        self._newest_by_step: dict[str, int] = {}
        for folder, step in filter(None, map(_step_of_trainer, whole)):
            self._newest_by_step[folder] = max(self._newest_by_step.get(folder, -1), step)

    def may_be(self, own: str) -> bool:
        """Return whether the object under a key (without the run's prefix) may have come by itself after the end."""
        if self._closing is None:
            return False
        if own.startswith("policy-files/"):  # a trainer that starts writes them before it learns that the run has ended
            epoch = latest_epoch(self._audit.store, self._audit.names, "trainer")
            its_files = f"policy-files/e{epoch}-"
            has_published = any(each.startswith(its_files) for each in self._sealed)
            return own.startswith(its_files) and (self._state != "SUCCEEDED" or not has_published)
        if own.startswith(_TRAINER_EPOCHS):
            # A trainer looks for the seal before it takes its epoch, and the seal may be written between the two.
            return own == f"{_TRAINER_EPOCHS}{self._newest_epoch + 1:08d}"
        if self._state == "SUCCEEDED":
            return False
        if own.startswith("retirements/"):
            return retires_checkpoints_only(self._audit, own)
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
    def _newest_epoch(self) -> int:
        """Return the newest epoch of the trainer that the seal lists, or a manifest names; 0 if there is none."""
        root = self._audit.names.root
        known = {*self._sealed, *(key.removeprefix(root) for key in self._audit.named)}
        numbers = [own.removeprefix(_TRAINER_EPOCHS) for own in known if own.startswith(_TRAINER_EPOCHS)]
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    @functools.cached_property
    def _is_resumed(self) -> bool:
        """Return whether a user asked to resume the run after its present end."""
        root, intents = self._audit.names.root, self._audit.store.list(self._audit.names.intents)
        return any(self._asks_to_resume(info.key.removeprefix(root)) for info in intents)

    def _asks_to_resume(self, own: str) -> bool:
        """Return whether the object under a key (without the run's prefix) is an intent to reopen the run's present
        end.
        """
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
            return False  # reported where intents are read
        payload, wanted = asked.get("payload"), hashlib.sha256(header).hexdigest()
        return asked.get("kind") == "reopen" and isinstance(payload, dict) and payload.get("closing_sha256") == wanted


def _version_of(own: str) -> tuple[int, int] | None:
    """Return lineage and version of the policy that has the object under a key without the run's prefix; else None."""
    place = POLICY_OBJECT.parse(own)
    return None if place is None else (int(place["lineage"]), int(place["version"]))


def _step_of_trainer(own: str) -> tuple[str, int] | None:
    """Return folder and step of the checkpoint or token log under a key without the run's prefix.

    None for another key.
    """
    place = re.match(r"(checkpoints|token_logs)/([0-9]+)/", own)
    return None if place is None else (place[1], int(place[2]))


def _step_of(own: str) -> int | None:
    """Return the step of the batch or archive under a key without the run's prefix; None for another key."""
    folder, _, rest = own.partition("/")
    step = rest.partition("/")[0]
    return int(step) if folder in ("batches", "rollouts") and step.isdecimal() else None


def _check_quarantined(audit: Audit, key: str, size_bytes: int) -> None:
    """Note an object that `run repair` has set aside; a deep audit reports one whose hash is not in its key."""
    if audit.is_deep and key.rpartition(".")[2] != audit.sha256(key, size_bytes)[:16]:
        audit.findings.violation("OBJECT_UNNAMED", f"{audit.uri(key)} is not what `run repair` sets aside")
    else:
        audit.findings.note("QUARANTINED", f"{audit.uri(key)} is what `run repair` set aside")
