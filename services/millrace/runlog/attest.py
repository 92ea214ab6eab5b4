"""Attestations: a signed chain hash, so that a history that was rewritten as a whole is found, too.

An attacker with write access can make a new history whose hashes all fit, but cannot sign it: an attestation binds the
chain hash (and of an ended run the seal) to a key that is not in the store. It is stored create-only under
`attestations/`, and can be kept elsewhere, which is what makes its removal visible.

The key is a file of 32 bytes or more for HMAC-SHA256, or an Ed25519 private (or, to check, public) key in PEM, which
needs the package `cryptography`.
"""

import datetime
import hashlib
import hmac
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation
from millrace.runlog.names import Names
from millrace.runlog.records.numbered import create_next
from millrace.storage import ObjectStore

FORMAT = 2
MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 64 << 10
# Precedes what is signed, so that a signature that the key made of anything else is none of an attestation.
_DOMAIN = b"millrace attestation 1\0"
HMAC = "hmac-sha256"
ED25519 = "ed25519"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key that signs or checks; its bytes are in no message and no repr."""

    algorithm: str
    key_id: str
    """Names the key without giving it away: 16 hex digits."""
    _material: Any

    def __repr__(self) -> str:
        return f"SigningKey({self.algorithm}, {self.key_id})"

    def sign(self, message: bytes) -> str:
        """Return the signature of the message in hex.

        `InvalidSpecError` if the key is a public one, which can only check.
        """
        if self.algorithm == HMAC:
            return hmac.new(self._material, message, hashlib.sha256).hexdigest()
        private, _ = self._material
        if private is None:
            raise _bad_key("is a public key, which cannot sign")
        return private.sign(message).hex()

    def verifies(self, message: bytes, signature: str) -> bool:
        """Return whether `signature` (hex) is that of `message` by this key."""
        if self.algorithm == HMAC:
            # As bytes: of texts `compare_digest` takes ASCII only, and a stored signature may be any text.
            return hmac.compare_digest(self.sign(message).encode(), signature.encode())
        from cryptography.exceptions import InvalidSignature

        _, public = self._material
        try:
            public.verify(bytes.fromhex(signature), message)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """What was signed. Times are ISO 8601 with a zone."""

    number: int
    """From 1, in the order of their making: which object of the run it is."""
    run_uid: str
    run: str
    step: int
    """The newest header; its step."""
    chain_hash: str
    """Chain hash after it, hex."""
    seal_sha256: str
    """sha256 (hex) of the seal; empty if the run had not ended."""
    time: str
    algorithm: str
    key_id: str
    signature: str = ""

    def message(self) -> bytes:
        """Return the bytes that are signed: all fields but the signature, as canonical JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "signature"}
        return _DOMAIN + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    def encode(self) -> bytes:
        """Return the attestation with its signature as JSON, for the store or a file."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"format": FORMAT, **fields}, sort_keys=True, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> "Attestation":
        """Parse an attestation without checking its signature.

        `CorruptObjectError` if the bytes are none; `where` names the object or file in its message.
        """
        raw = decode_object(data, what=where, reason="ATTESTATION_CORRUPT", max_bytes=1 << 20)
        fields = {name: raw.get(name) for name in cls.__slots__}
        texts = [value for name, value in fields.items() if name not in ("number", "step")]
        if (
            raw.get("format") != FORMAT
            or set(raw) != {"format", *fields}
            or not all(isinstance(text, str) for text in texts)
            or any(type(fields[name]) is not int for name in ("number", "step"))
        ):
            raise CorruptObjectError(f"{where} is no attestation", reason="ATTESTATION_CORRUPT")
        return cls(**fields)  # type: ignore[arg-type]


def load_key(path: Path) -> SigningKey:
    """Load the key in a file: an Ed25519 key in PEM, or any other bytes as a key of HMAC-SHA256.

    `InvalidSpecError` naming the file if it cannot be read, or holds no key of a permitted size.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise _bad_key(f"cannot be read: {error.strerror or error}", value=str(path)) from error
    # PEM holds a key of Ed25519; any other bytes are themselves the key of HMAC.
    if data.startswith(b"-----BEGIN"):
        return _load_ed25519(data, path)
    if not MIN_KEY_BYTES <= len(data) <= MAX_KEY_BYTES:
        raise _bad_key(
            f"has {len(data)} bytes; a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} "
            f"(`head -c {MIN_KEY_BYTES} /dev/urandom > FILE`)",
            value=str(path),
        )
    key_id = hmac.new(data, b"millrace key id", hashlib.sha256).hexdigest()[:16]
    return SigningKey(HMAC, key_id, data)


def write_attestation(store: ObjectStore, names: Names, attestation: Attestation, key: SigningKey) -> Attestation:
    """Sign an attestation and store it under the next free number (blocking); return it signed.

    Its number, algorithm and key id are set here; those of `attestation` are ignored.
    """

    def signed(number: int) -> Attestation:
        """Return the attestation with this number, and with the key's signature."""
        # The number is signed, too: the order of attestations cannot be changed.
        draft = replace(attestation, number=number, algorithm=key.algorithm, key_id=key.key_id)
        return replace(draft, signature=key.sign(draft.message()))

    # Numbers are dense from 1, so that their count is the last one.
    last = sum(1 for _ in store.list(names.attestations))
    number = create_next(
        store,
        names,
        lambda number: signed(number).encode(),
        key_of=names.attestation,
        last=last,
        what="an attestation",
        reason="ATTESTATION_CONTENDED",
    )
    return signed(number)


def unsigned(names: Names, *, run: str, step: int, chain: bytes, seal_sha256: str) -> Attestation:
    """Return an attestation of the run's present state: not signed, without number and key, and not stored.

    `run` is the run's name, `step` that of the newest header and `chain` the chain hash after it. `seal_sha256` (hex)
    is empty if the run has not ended. Its time is now.
    """
    return Attestation(
        number=0,
        run_uid=names.uid,
        run=run,
        step=step,
        chain_hash=chain.hex(),
        seal_sha256=seal_sha256,
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        algorithm="",
        key_id="",
    )


def _load_ed25519(data: bytes, path: Path) -> SigningKey:
    """Return the Ed25519 key in PEM `data`.

    `InvalidSpecError`, naming `path`, if it is none or `cryptography` is missing.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    except ModuleNotFoundError as error:
        raise _bad_key(
            "is in PEM, which needs the package cryptography (pip install cryptography), or use 32 random bytes",
            value=str(path),
        ) from error
    try:
        is_public = b"PUBLIC KEY" in data.partition(b"\n")[0]
        loaded = (
            serialization.load_pem_public_key(data)
            if is_public
            else serialization.load_pem_private_key(data, password=None)
        )
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _bad_key("holds no key in PEM without a password", value=str(path)) from error
    private = loaded if isinstance(loaded, Ed25519PrivateKey) else None
    public = private.public_key() if private is not None else loaded
    if not isinstance(public, Ed25519PublicKey):
        raise _bad_key("holds a key that is not of Ed25519", value=str(path))
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return SigningKey(ED25519, hashlib.sha256(raw).hexdigest()[:16], (private, public))


def _bad_key(message: str, *, value: str = "") -> InvalidSpecError:
    """Make the error for a key file that cannot be used; `message` says why, `value` is the file's path."""
    return InvalidSpecError([Violation(field="key file", value=value, message=message, source="command line")])
