"""Seals: an ended run has one, and it says what the log says."""

import hashlib

from millrace.runlog.audit.findings import Audit
from millrace.runlog.audit.named import NamedCheck
from millrace.runlog.audit.told import Told
from millrace.runlog.records.sealed import Seal, seal_key
from millrace.v1 import run_pb2

GRACE_S = 300.0
"""How long an ended run may be without its seal: an orchestrator that starts again seals it.

Nobody accuses a run because one clock jumped: both its writers' clocks and the store's must say that it was long ago.
"""
END_GRACE_S = 3600.0
"""How long a closed run may be without an event of its end: the trainer writes its last version and checkpoint."""


class SealCheck:
    """Reads every seal: what they name goes to `NamedCheck`."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._seals: dict[str, Seal] = {}
        self._hashes: dict[str, str] = {}
        self._closing_key = ""
        self.saved: dict[int, str] = {}
        """sha256 (hex) of the manifests of checkpoints that seals name, by step."""
        self.key = ""
        """That of the seal of the present end, once `compare` has looked."""

    def scan(self, named: NamedCheck) -> None:
        """Read them."""
        audit, names = self._audit, self._audit.names
        keys = {info.key: info for info in audit.store.list(names.seals)}
        for number in range(sum(1 for _ in audit.store.list(names.reopenings))):
            if names.seal(number) not in keys:  # if it was there, a later seal names it
                audit.findings.note(
                    "SEAL_MISSING", f"{audit.uri(names.seal(number))} does not exist: the run was reopened before"
                )
        for info in keys.values():
            what = f"seal {audit.uri(info.key)}"
            if not info.key.removeprefix(names.seals).removesuffix(".json").isdecimal():
                audit.findings.violation("SEAL_CORRUPT", f"{audit.uri(info.key)} is no seal's place")
            data = audit.get(info.key, what=what)
            if data is None:
                continue
            self._hashes[info.key] = hashlib.sha256(data).hexdigest()
            with audit.reading("SEAL_CORRUPT", what):
                seal = self._seals[info.key] = Seal.decode(data, where=what)
                named.add_seal(seal.objects, by=what)
                for key, sha256 in seal.objects.items():
                    self._note_checkpoint(key, sha256)

    def compare(self, told: Told, *, closings: list[bytes], closing_key: str, now: float) -> None:
        """Compare with the closing headers' chain hashes (in their order) and with the end that events tell of.

        `closing_key` is that of the closing header in force, empty if there is none.
        """
        self._closing_key = closing_key
        findings, names = self._audit.findings, self._audit.names
        for key, seal in self._seals.items():
            if seal.run_uid != names.uid:
                findings.violation("SEAL_CHANGED", f"{self._audit.uri(key)} is that of run {seal.run_uid!r}")
            ends = [chain.hex() for end, chain in enumerate(closings) if names.seal(end) == key]
            if seal.chain_hash not in ends:
                findings.violation(
                    "SEAL_CHAIN_MISMATCH",
                    f"{self._audit.uri(key)} seals the chain {seal.chain_hash[:16]}…, the headers give "
                    f"{f'{ends[0][:16]}…' if ends else 'no such end'}",
                )
        wanted = self.key = seal_key(self._audit.store, names)
        self._audit.report.seal_sha256 = self._hashes.get(wanted, "")
        if told.end is None:
            if wanted in self._seals:
                findings.violation("END_NOT_REPORTED", "the run is sealed, and no event says that it ended")
            elif closing_key and now - self._newest_at(told.newest_at) > END_GRACE_S:
                findings.violation(
                    "END_NOT_REPORTED",
                    "the run was closed long ago, and no event says that it ended: an orchestrator that runs ends it; "
                    "if one does, somebody removed the events",
                )
            return
        change, at = told.end
        state = run_pb2.RunState.Name(change.new_state).removeprefix("RUN_STATE_")
        seal = self._seals.get(wanted)
        if seal is not None and seal.state != state:
            findings.violation("OUTCOME_MISMATCH", f"the run ended as {state}, its seal says {seal.state!r:.80}")
        if self._audit.store.head(wanted) is None:
            message = (
                f"the run ended as {state}, and {self._audit.uri(wanted)} does not exist: an orchestrator that runs "
                "seals it; if one does, somebody removed it"
            )
            is_old = now - self._newest_at(at) > GRACE_S
            (findings.violation if is_old else findings.note)("SEAL_MISSING", message)
        elif seal is not None and " later" in seal.by:
            findings.note("SEALED_LATER", f"sealed by {seal.by} at {seal.time}: what was changed before is not sealed")

    @property
    def in_force(self) -> Seal | None:
        """The seal of the run's present end; None without one, or if it is damaged."""
        return self._seals.get(self.key)

    def _newest_at(self, told_at: float) -> float:
        """When the run was closed: the later of what an event says and of the header's time, on the store's clock."""
        found = self._audit.store.head(self._closing_key) if self._closing_key else None
        return max(told_at, found.modified if found is not None else 0.0)

    def _note_checkpoint(self, key: str, sha256: str) -> None:
        full, prefix = self._audit.names.root + key, self._audit.names.checkpoints
        step = full.removeprefix(prefix).removesuffix("/manifest.json")
        if full.startswith(prefix) and step.isdecimal():
            self.saved[int(step)] = sha256
