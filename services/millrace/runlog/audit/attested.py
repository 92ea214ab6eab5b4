"""Attestations: what was signed is what the log says, so that a history that was rewritten as a whole is found."""

import hashlib
from collections.abc import Mapping, Sequence

from millrace.errors import CorruptObjectError
from millrace.runlog.attest import Attestation, SigningKey
from millrace.runlog.audit.findings import Audit


def check_attestations(
    audit: Audit,
    chains: Mapping[int, bytes],
    closings: Sequence[bytes],
    *,
    key: SigningKey | None,
    kept: Sequence[Attestation],
) -> None:
    """Check every attestation in the store, and those that were kept elsewhere, against the headers' chain hashes."""
    names, findings = audit.names, audit.findings
    stored: list[Attestation] = []
    for number, info in enumerate(list(audit.store.list(names.attestations)), start=1):
        where = audit.uri(info.key)
        if info.key != names.attestation(number):
            findings.violation("ATTESTATION_MISSING", f"{audit.uri(names.attestation(number))} does not exist")
        data = audit.get(info.key, what="attestation")
        if data is None:
            continue
        try:
            stored.append(Attestation.decode(data, where=where))
        except CorruptObjectError as error:
            findings.violation("ATTESTATION_CORRUPT", error.message)
            continue
        if info.key != names.attestation(stored[-1].number):
            findings.violation(
                "ATTESTATION_MISNAMED", f"{where} is attestation {stored[-1].number}, and stands elsewhere"
            )
        _check(audit, stored[-1], where, chains, closings, key=key)
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
            f"{where} says that the chain behind step {attestation.step} was {wanted[:16]}…, the headers give "
            f"{chains.get(attestation.step, b'').hex()[:16] or 'none'}…: the history was rewritten",
        )
    elif attestation.seal_sha256 and attestation.seal_sha256 not in _seals(audit):
        findings.violation(
            "ATTESTATION_MISMATCH", f"{where} names a seal with sha256 {attestation.seal_sha256[:16]}…, which is gone"
        )
    elif key is not None:
        audit.report.num_attestations += 1


def _seals(audit: Audit) -> set[str]:
    return {hashlib.sha256(data).hexdigest() for _, data in audit.read_each(audit.names.seals, "seal")}
