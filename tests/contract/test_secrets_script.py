"""`docker/secrets.sh` with a real openssl: what it makes fits together, and a second run destroys nothing."""

import re
import shutil
import ssl
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from millrace_testing.certificates import Authority

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docker" / "secrets.sh"
DEADLINE_S = 120.0

pytestmark = [
    pytest.mark.computes,
    pytest.mark.skipif(not shutil.which("openssl"), reason="docker/secrets.sh needs openssl"),
]


def call(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", SCRIPT, directory], capture_output=True, text=True, timeout=DEADLINE_S)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "secrets"
    done = call(directory)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def secrets(made: Path, tmp_path: Path) -> Path:
    """Return a directory as the first run leaves it."""
    return shutil.copytree(made, tmp_path / "secrets")


def verify(directory: Path, name: str) -> None:
    """The certificate is signed by ca.crt and has its key."""
    check = ["openssl", "verify", "-CAfile", directory / "ca.crt", directory / f"{name}.crt"]
    assert subprocess.run(check, capture_output=True, timeout=DEADLINE_S).returncode == 0, name
    ssl.create_default_context().load_cert_chain(directory / f"{name}.crt", directory / f"{name}.key")


def refused(directory: Path) -> str:
    """Return what the script says when it gives up; it has changed nothing and left nothing behind."""
    before = contents(directory)
    done = call(directory)
    assert done.returncode == 1
    assert contents(directory) == before
    return done.stderr


def remade(directory: Path) -> set[str]:
    """Return names of the files that a successful run has changed or made."""
    before = contents(directory)
    done = call(directory)
    assert done.returncode == 0, done.stderr
    after = contents(directory)
    assert before.keys() <= after.keys()
    return {name for name, content in after.items() if before.get(name) != content}


def test_everything_fits_together_and_a_second_run_changes_nothing(secrets: Path) -> None:
    for name in ("tls", "client"):
        verify(secrets, name)
    token = (secrets / "client.token").read_bytes()
    assert (secrets / "tokens").read_text() == f"sha256:{sha256(token).hexdigest()} client\n"
    password = (secrets / "redis.conf").read_text().split()[1]
    assert f"://:{password}@redis:6379/0" in (secrets / "redis.url").read_text()
    assert (secrets.stat().st_mode & 0o777, (secrets / "ca.key").stat().st_mode & 0o777) == (0o700, 0o600)
    assert remade(secrets) == set()


@pytest.mark.parametrize("content", [None, ""], ids=["deleted", "empty"])
def test_a_certificate_is_not_renewed_without_the_key_of_the_authority(secrets: Path, content: str | None) -> None:
    kept = (secrets / "ca.key").rename(secrets.parent / "ca.key")
    assert remade(secrets) == set()  # it is needed for nothing yet
    (secrets / "tls.crt").unlink() if content is None else (secrets / "tls.crt").write_text(content)
    assert "put ca.key back" in refused(secrets)
    kept.rename(secrets / "ca.key")
    same_file = (secrets / "tls.key").stat().st_ino
    assert remade(secrets) - {"tls.key.old", "tls.crt.old"} == {"tls.crt", "tls.key"}
    assert (secrets / "tls.key").stat().st_ino == same_file
    verify(secrets, "tls")


def test_the_key_of_another_authority_signs_nothing(secrets: Path) -> None:
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", secrets / "ca.key"],
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    (secrets / "client.crt").unlink()
    assert "is not the key of ca.crt" in refused(secrets)


def test_a_failing_openssl_changes_nothing(secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It signs nothing, says why and exits with 1, as it does for a disk that is full."""
    bin_ = secrets.parent / "bin"
    bin_.mkdir()
    real = shutil.which("openssl")
    (bin_ / "openssl").write_text(
        f'#!/bin/sh\ncase "$*" in *-req*) echo "cannot sign today" >&2; exit 1 ;; esac\nexec {real} "$@"\n'
    )
    (bin_ / "openssl").chmod(0o755)
    (secrets / "client.crt").unlink()
    monkeypatch.setenv("PATH", str(bin_), prepend=":")
    assert "cannot sign today" in refused(secrets)


def test_a_new_authority_signs_everything_anew(secrets: Path) -> None:
    (secrets / "ca.crt").unlink()
    assert remade(secrets) == {"ca.crt"}  # for the key that is there, which has signed the others
    for name in ("ca.crt", "ca.key"):
        (secrets / name).unlink()
    leaves = {"tls.crt", "tls.key", "client.crt", "client.key"}
    assert remade(secrets) == leaves | {f"{name}.old" for name in leaves} | {"ca.crt", "ca.key"}
    for name in ("tls", "client"):
        verify(secrets, name)


@pytest.mark.parametrize("wrong", ["foreign", "key"])
def test_a_certificate_that_does_not_fit_is_made_anew(secrets: Path, wrong: str) -> None:
    if wrong == "key":
        shutil.copy(secrets / "client.key", secrets / "tls.key")
    else:
        pair = Authority(secrets.parent / "other").issue("leaf")
        shutil.copy(pair.cert, secrets / "tls.crt")
        shutil.copy(pair.key, secrets / "tls.key")
    assert remade(secrets) == {"tls.crt", "tls.key", "tls.crt.old", "tls.key.old"}
    verify(secrets, "tls")


def test_certificates_of_ones_own_authority_are_kept(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    authority = Authority(tmp_path / "own")
    shutil.copy(authority.path, secrets / "ca.crt")
    for name in ("tls", "client"):
        pair = authority.issue(name)
        shutil.copy(pair.cert, secrets / f"{name}.crt")
        shutil.copy(pair.key, secrets / f"{name}.key")
    made = remade(secrets)
    assert "tokens" in made and not [name for name in made if name.startswith(("ca.", "tls.", "client.c", "client.k"))]


def test_a_client_token_that_is_made_anew_revokes_the_old_one(secrets: Path) -> None:
    others = f"# of the team\nsha256:{'0' * 64} alice expires=2030-01-31T12:00:00Z\n"
    (secrets / "tokens").write_text((secrets / "tokens").read_text() + others)
    (secrets / "client.token").unlink()
    assert remade(secrets) == {"client.token", "tokens"}
    token = (secrets / "client.token").read_bytes()
    assert (secrets / "tokens").read_text() == f"{others}sha256:{sha256(token).hexdigest()} client\n"
    (secrets / "tokens").unlink()
    assert remade(secrets) == {"tokens"}
    assert (secrets / "tokens").read_text() == f"sha256:{sha256(token).hexdigest()} client\n"


@pytest.mark.parametrize(("one", "other"), [("redis.conf", "redis.url"), ("s3.json", "aws_credentials")])
def test_a_missing_half_follows_the_other_and_both_are_new(secrets: Path, one: str, other: str) -> None:
    before = contents(secrets)
    for name in (one, other):
        (secrets / name).unlink()
        assert remade(secrets) == {name}
        assert (secrets / name).read_bytes() == before[name]
    for name in (one, other):
        (secrets / name).unlink()
    assert remade(secrets) == {one, other}
    after = contents(secrets)
    assert after[one] != before[one] and after[other] != before[other]


def test_a_redis_elsewhere_keeps_its_url(secrets: Path) -> None:
    (secrets / "redis.url").write_text("rediss://:s3cr%2Ft@cache.example:6379/0\n")
    (secrets / "redis.conf").unlink()
    assert remade(secrets) == {"redis.conf"}
    assert re.fullmatch(r"requirepass [0-9a-f]{64}\n", (secrets / "redis.conf").read_text())


def test_a_pair_that_cannot_be_taken_over_is_left_alone(secrets: Path) -> None:
    (secrets / "redis.conf").write_text("requirepass #&secret\n")
    (secrets / "redis.url").unlink()
    assert "write both" in refused(secrets)
