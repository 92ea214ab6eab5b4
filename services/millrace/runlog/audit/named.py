"""Small objects that headers and seals name by their sha256: all of them are there, and as they were named."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from millrace.errors import CorruptObjectError, InvalidSpecError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.runlog.audit.findings import Audit
from millrace.runlog.records.known import describe

_AT_ONCE = 16  # objects fetched at once
_PROGRESS_EVERY = 256
MAX_NAMED_BYTES = 128 << 20
"""Largest object that is read because somebody names it; those that headers name have some megabytes at most."""

KINDS = {
    "run.json": "RUN_JSON",
    "epochs/": "EPOCH",
    "generations/": "GENERATION",
    "intents/": "INTENT",
    "events/": "EVENT_ARCHIVE",
    "policies/": "POLICY",
    "checkpoints/": "CHECKPOINT",
    "scores/": "SCORES",
    "reopened/": "REOPENING",
    "seals/": "SEAL",
}
"""What an object is, as the names of checks begin, by the beginning of its key behind the run's prefix."""


@dataclass(frozen=True, slots=True)
class _Named:
    sha256: str
    digest: str
    by: str


class NamedCheck:
    """Takes what is named, then compares each with the store."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._named: dict[str, _Named] = {}
        self.repaired: set[str] = set()
        """Manifests that a whole successor stands in for: they may be damaged or gone."""
        self.pruned: set[str] = set()
        """What retention has removed."""

    def add_header(self, header: batch_pb2.BatchHeader) -> None:
        """Take what a header names."""
        for ref in header.objects:
            self._add(ref.key, ref.sha256.hex(), ref.digest, f"header {header.step}")

    def add_seal(self, objects: Mapping[str, str], *, by: str) -> None:
        """Take what a seal names, by its key behind the run's prefix."""
        for key, sha256 in objects.items():
            self._add(key, sha256, "", by)

    def digest_of(self, key: str) -> str:
        """The digest of weights that a header names with a manifest, hex; empty if none does."""
        named = self._named.get(key)
        return named.digest if named else ""

    def compare(self) -> None:
        """Read every named object; several at once, since there may be many."""
        keys = sorted(self._named.keys() - self.pruned - self.repaired)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="audit-named") as pool:
            for first in range(0, len(keys), _PROGRESS_EVERY):
                self._audit.progress(f"object {first} of {len(keys)} that headers name")
                for found in pool.map(self._compare, keys[first : first + _PROGRESS_EVERY]):
                    if found is not None:
                        self._audit.findings.violation(*found)

    def _add(self, key: str, sha256: str, digest: str, by: str) -> None:
        kind = kind_of(key)
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
        audit, named, kind = self._audit, self._named[key], kind_of(key)
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


def kind_of(key: str) -> str:
    """What an object is by its key behind the run's prefix, as the names of checks begin; empty if it is none."""
    return next((kind for start, kind in KINDS.items() if key.startswith(start)), "")
