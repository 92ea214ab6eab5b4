"""What the run is: run.json fits its hash, and the run's name and its request lead to it."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from millrace.errors import InvalidSpecError
from millrace.readers.audit.events import EventClaims
from millrace.readers.audit.findings import Audit, as_utf8
from millrace.readers.audit.named import ReferencedObjects
from millrace.runlog.attest import Attestation, SigningKey
from millrace.runlog.catalogue import ATTESTATION, CHECKPOINT_MANIFEST, EPOCH, SEAL
from millrace.runlog.names import Deployment
from millrace.runlog.records.numbered import GENERATION_ROLE
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.records.sealed import Seal, seal_key
from millrace.v1 import run_pb2


def check_identity(audit: Audit, record: RunRecord) -> set[str]:
    """Report where run.json contradicts itself or the index of runs.

    Return the whole keys of the index that lead to the run: its name's, and its request's.
    """
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
    """Report a violation unless a name's or request's object leads to the run; return the object's whole key.

    `kind` is NAME or REQUEST, `key_of` makes the key of `value`. Empty, with a violation, if `value` is no legal one.
    """
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
    """Return `keep_last` and `keep_interval` of the run's checkpoints by its config; (None, None) if it keeps all."""
    try:
        settings = (record.config or {})["trainer"]["ckpt"]
        keep_last, keep_interval = settings.get("keep_last"), settings.get("keep_interval")
    except (KeyError, TypeError, AttributeError):
        return None, None
    if not isinstance(keep_last, int) or keep_last < 1:
        return None, None
    return keep_last, keep_interval if isinstance(keep_interval, int) and keep_interval > 0 else None


# Epochs and generations: which there are, and that no generation came without an epoch.


def check_epochs(audit: Audit) -> dict[str, int]:
    """Report gaps and damage among every role's epochs; return the newest epoch by role."""
    newest: dict[str, int] = {}
    for place, *_ in audit.read_kind(EPOCH):
        role, number = str(place["role"]), int(place["number"])
        newest[role] = max(number, newest.get(role, 0))
    for role, number in newest.items():
        audit.report.epochs[as_utf8(role)] = min(number, (1 << 63) - 1)
    if GENERATION_ROLE not in newest:
        audit.findings.violation("EPOCH_MISSING", f"no epoch of {GENERATION_ROLE} exists: the run was never created")
    return newest


def check_generations(audit: Audit, seen_in_events: int) -> int:
    """Report wrong or missing marks of generations of the Redis copy; return the newest installed generation.

    That is 1 at creation, then one more for each rebuild. `seen_in_events` is the newest generation that archived
    events have: it was installed, so it has a mark.
    """
    prefix = audit.names.generations
    installed = {1}
    for info in audit.store.list(prefix):
        name = info.key.removeprefix(prefix)
        if not name.isdecimal() or audit.names.generation(int(name)) != info.key or info.size_bytes:
            audit.findings.violation("GENERATION_CORRUPT", f"{audit.uri(info.key)} is no mark of a generation")
        else:
            installed.add(int(name))
    if seen_in_events > max(installed):
        audit.findings.violation(
            "GENERATION_MISSING",
            f"archived events are of generation {seen_in_events}, and "
            f"{audit.uri(audit.names.generation(seen_in_events))} does not exist",
        )
    # A rebuild takes the epoch of its number before it writes the mark.
    for number in sorted(installed - {1}):
        if audit.store.head(audit.names.epoch(GENERATION_ROLE, number)) is None:
            audit.findings.violation(
                "GENERATION_CORRUPT",
                f"{audit.uri(audit.names.generation(number))} marks a generation whose epoch of {GENERATION_ROLE} "
                "nobody took",
            )
    audit.report.num_generations = len(installed)
    return max(installed)


# Attestations: what was signed is what the log says, so that a history that was rewritten as a whole is found.


def check_attestations(
    audit: Audit,
    chains: Mapping[int, bytes],
    closings: Sequence[bytes],
    *,
    key: SigningKey | None,
    kept: Sequence[Attestation],
) -> None:
    """Check every attestation in the store, and those `kept` elsewhere, against the headers' chain hashes.

    `chains` has the chain hash after each step, `closings` those after closing headers. Without a `key` signatures are
    not checked, which is noted.
    """
    findings = audit.findings
    stored: list[Attestation] = []
    for place, stored_key, _, attestation in audit.read_kind(ATTESTATION):
        if attestation is None:
            continue
        stored.append(attestation)
        where = audit.uri(stored_key)
        if place["number"] != attestation.number:
            findings.violation(
                "ATTESTATION_MISNAMED", f"{where} is attestation {attestation.number}, and is stored under another key"
            )
        _check(audit, attestation, where, chains, closings, key=key)
    for number, attestation in enumerate(kept, start=1):
        where = f"kept attestation {number} ({attestation.time:.40})"
        _check(audit, attestation, where, chains, closings, key=key)
        if attestation not in stored:
            findings.violation("ATTESTATION_MISSING", f"the store does not have the {where}")
    if not stored and not kept:
        findings.not_seen(
            "NO_ATTESTATION",
            "the run has no attestation: a history that was rewritten as a whole, with every hash, would not be seen",
        )
    elif key is None:
        findings.not_seen(
            "SIGNATURES", "no key was named: the signatures of attestations were not checked (--attest-key)"
        )


def _check(
    audit: Audit,
    attestation: Attestation,
    where: str,
    chains: Mapping[int, bytes],
    closings: Sequence[bytes],
    *,
    key: SigningKey | None,
) -> None:
    """Report an attestation (`where`, in words) that is of another run, not signed by `key`, or of another history
    or seal.
    """
    findings = audit.findings
    if attestation.run_uid != audit.names.uid:
        findings.violation("ATTESTATION_MISMATCH", f"{where} is of run {attestation.run_uid[:80]!r}")
        return
    if key is not None and (attestation.algorithm, attestation.key_id) != (key.algorithm, key.key_id):
        findings.violation(
            "SIGNATURE_WRONG",
            f"{where} was signed with the key {attestation.key_id:.16} ({attestation.algorithm:.16}), not with "
            f"{key.key_id} ({key.algorithm})",
        )
        return
    if key is not None and not key.verifies(attestation.message(), attestation.signature):
        findings.violation("SIGNATURE_WRONG", f"{where} was not signed by the key {key.key_id}, or was changed")
        return
    wanted = attestation.chain_hash
    if wanted not in {chain.hex() for chain in (chains.get(attestation.step, b""), *closings)}:
        findings.violation(
            "ATTESTATION_MISMATCH",
            f"{where} says that the chain after step {attestation.step} was {wanted[:16]}…, the headers give "
            f"{chains.get(attestation.step, b'').hex()[:16] or 'none'}…: the history was rewritten",
        )
    elif attestation.seal_sha256 and attestation.seal_sha256 not in _seals(audit):
        findings.violation(
            "ATTESTATION_MISMATCH", f"{where} names a seal with sha256 {attestation.seal_sha256[:16]}…, which is gone"
        )
    elif key is not None:
        audit.report.num_attestations += 1


def _seals(audit: Audit) -> set[str]:
    """Return the sha256 (hex) of every seal of the run."""
    return {hashlib.sha256(data).hexdigest() for _, data in audit.read_each(audit.names.seals, "seal")}


# Seals: an ended run has one, and it says what the log says.

GRACE_S = 300.0
"""How long an ended run may be without its seal: an orchestrator that starts again seals it.

Nobody accuses a run because one clock jumped: both its writers' clocks and the store's must say that it was long ago.
"""
END_GRACE_S = 3600.0
"""How long a closed run may be without an event of its end: the trainer writes its last version and checkpoint."""


class SealCheck:
    """Reads every seal: what they name goes to `ReferencedObjects`."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._seals: dict[str, Seal] = {}
        self._hashes: dict[str, str] = {}
        self._closing_key = ""
        self.saved: dict[int, str] = {}
        """sha256 (hex) of the manifests of checkpoints that seals name, by step."""
        self.key = ""
        """That of the seal of the present end, once `compare` has looked."""

    def scan(self, named: ReferencedObjects) -> None:
        """Read every seal, and hand what it names to `named`.

        Notes each end before a reopening whose seal is missing.
        """
        audit, names = self._audit, self._audit.names
        for _, key, data, seal in audit.read_kind(SEAL):
            self._hashes[key] = hashlib.sha256(data).hexdigest()
            if seal is None:
                continue
            self._seals[key] = seal
            named.add_seal(seal.objects, by=f"seal {audit.uri(key)}")
            for own, sha256 in seal.objects.items():
                self._note_checkpoint(own, sha256)
        for number in range(sum(1 for _ in audit.store.list(names.reopenings))):
            if audit.store.head(names.seal(number)) is None:  # if it was there, a later seal names it
                audit.findings.note(
                    "SEAL_MISSING", f"{audit.uri(names.seal(number))} does not exist: the run was reopened before"
                )

    def compare(self, claims: EventClaims, *, closings: list[bytes], closing_key: str, now: float) -> None:
        """Compare the seals with the closing headers' chain hashes (in their order) and with the end that events claim.

        `closing_key` is that of the closing header in force, empty if there is none; `now` is in seconds since
        the epoch.
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
        # The event of the end is archived before the seal is written: a seal without it is wrong at once. A run that is
        # closed and not sealed may still be ending.
        if claims.end is None:
            if wanted in self._seals:
                findings.violation("END_NOT_REPORTED", "the run is sealed, and no event says that it ended")
            elif closing_key and now - self._newest_at(claims.newest_at) > END_GRACE_S:
                findings.violation(
                    "END_NOT_REPORTED",
                    "the run was closed long ago, and no event says that it ended: an orchestrator that runs ends it; "
                    "if one does, somebody removed the events",
                )
            return
        change, at = claims.end
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
        """Return the seal of the run's present end; None without one, or if it is damaged."""
        return self._seals.get(self.key)

    def _newest_at(self, event_time: float) -> float:
        """Return when the run was closed (seconds since 1970): the later of an event's time and the closing header's
        in the store.
        """
        found = self._audit.store.head(self._closing_key) if self._closing_key else None
        return max(event_time, found.modified if found is not None else 0.0)

    def _note_checkpoint(self, key: str, sha256: str) -> None:
        """Note the manifest's hash if the key (without the run's prefix) is that of a checkpoint's first manifest."""
        place = CHECKPOINT_MANIFEST.parse(key)
        if place is not None and not place["revision"]:
            self.saved[int(place["step"])] = sha256
