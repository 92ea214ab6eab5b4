"""Keys that sign and check attestations: a shared secret, or a pair of which the public half only checks."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from millrace.errors import InvalidSpecError
from millrace.runlog.attest import Attestation, load_key, unsigned, write_attestation
from millrace.runlog.names import Names
from millrace.storage.local import LocalStore

NAMES = Names("millrace", "run-1")
PEM = serialization.Encoding.PEM
PKCS8, PLAIN = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    private = ed25519.Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    other = ec.generate_private_key(ec.SECP256R1())
    return {
        "secret": written(tmp_path / "secret", bytes(range(32))),
        "other secret": written(tmp_path / "other", bytes(range(1, 33))),
        "short": written(tmp_path / "short", b"x" * 31),
        "private": written(tmp_path / "private.pem", private.private_bytes(PEM, PKCS8, PLAIN)),
        "public": written(tmp_path / "public.pem", public),
        "of another kind": written(tmp_path / "ec.pem", other.private_bytes(PEM, PKCS8, PLAIN)),
        "damaged": written(tmp_path / "damaged.pem", b"-----BEGIN PRIVATE KEY-----\nxxxx\n-----END PRIVATE KEY-----\n"),
        "absent": tmp_path / "absent",
    }


@pytest.mark.parametrize(("signer", "checker"), [("secret", "secret"), ("private", "private"), ("private", "public")])
def test_what_was_signed_is_verified_and_nothing_else(
    local_store: LocalStore, keys: dict[str, Path], signer: str, checker: str
) -> None:
    head = unsigned(NAMES, run="mine", step=7, chain=bytes(32), seal_sha256=hashlib.sha256(b"seal").hexdigest())
    signed = write_attestation(local_store, NAMES, head, load_key(keys[signer]))
    stored = Attestation.decode(local_store.get(NAMES.attestation(1)), where="here")
    assert stored == signed
    key = load_key(keys[checker])
    assert key.key_id == stored.key_id and key.verifies(stored.message(), stored.signature)
    assert not key.verifies(replace(stored, step=8).message(), stored.signature)
    for hostile in ("", "00", "zz", "é", "0" * 200, stored.signature[:-1], stored.signature.upper() + "\0"):
        assert not key.verifies(stored.message(), hostile)
    other = load_key(keys["other secret"])
    assert other.key_id != key.key_id and not other.verifies(stored.message(), stored.signature)


def test_a_second_attestation_leaves_the_first(local_store: LocalStore, keys: dict[str, Path]) -> None:
    key = load_key(keys["secret"])
    for step in (1, 2):
        write_attestation(
            local_store, NAMES, unsigned(NAMES, run="mine", step=step, chain=bytes(32), seal_sha256=""), key
        )
    found = [local_store.get(info.key) for info in local_store.list(NAMES.attestations)]
    assert [Attestation.decode(data, where="here").step for data in found] == [1, 2]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", "has 31 bytes"),
        ("of another kind", "not of Ed25519"),
        ("damaged", "holds no key in PEM"),
        ("absent", "No such file"),
    ],
)
def test_a_key_that_is_none_is_named(keys: dict[str, Path], name: str, says: str) -> None:
    with pytest.raises(InvalidSpecError, match=says) as caught:
        load_key(keys[name])
    assert str(keys[name]) in str(caught.value)


def test_a_public_key_signs_nothing_and_no_key_shows_itself(local_store: LocalStore, keys: dict[str, Path]) -> None:
    head = unsigned(NAMES, run="mine", step=7, chain=bytes(32), seal_sha256="")
    with pytest.raises(InvalidSpecError, match="cannot sign"):
        write_attestation(local_store, NAMES, head, load_key(keys["public"]))
    secret = keys["secret"].read_bytes()
    assert secret.hex() not in repr(load_key(keys["secret"])) and repr(secret) not in repr(load_key(keys["secret"]))
