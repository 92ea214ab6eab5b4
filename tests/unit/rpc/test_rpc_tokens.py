"""Tokens and their lines, files that are read again, and durations."""

import datetime
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from millrace.errors import InvalidSpecError, UnavailableError
from millrace.rpc import tokens
from millrace.rpc.tokens import (
    SecretFile,
    TokensFile,
    WorkersFile,
    is_tenant,
    new_token,
    parse_duration,
    parse_line,
    parse_secret,
    token_digest,
    token_line,
)
from millrace.telemetry.logging import redact

NOON = datetime.datetime(2030, 1, 31, 12, tzinfo=datetime.UTC)


def test_tokens_are_long_different_and_hidden_by_redaction():
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    for token in made:
        assert parse_secret(token) == token
        assert redact(f"call with {token} failed", secrets=()) == "call with *** failed"


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789._@-", min_size=1, max_size=64), st.booleans())
def test_a_line_says_what_was_put_into_it(name, has_end):
    name = "a" + name[1:]
    token = new_token()
    line = token_line(token, name, expires=NOON if has_end else None)
    assert token not in line
    read = parse_line(line)
    assert (read.name, read.digest) == (name, token_digest(token))
    assert read.expires == (NOON.timestamp() if has_end else None)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "alice",
        "sha256:abc alice",
        f"sha256:{'0' * 64}",
        f"sha256:{'0' * 64} alice expires=tomorrow",
        f"sha256:{'0' * 64} alice expires=2030-01-31T12:00:00",  # no zone
        f"sha256:{'0' * 64} alice expires=2030-01-31T12:00:00Z more",
        f"sha256:{'0' * 64} alice access=none",
        f"sha256:{'0' * 64} alice access=",
        f"sha256:{'0' * 64} alice access=read access=write",
        f"sha256:{'0' * 64} a/b",
        f"sha512:{'0' * 64} alice",
        "mrt_this-is-a-token-and-not-its-line-aaaaaaaaaa",
    ],
)
def test_bad_lines_are_refused_and_not_shown(line):
    with pytest.raises(ValueError) as caught:
        parse_line(line)
    assert "mrt_" not in str(caught.value)


@pytest.mark.parametrize(("may_write", "expires"), [(False, None), (False, NOON), (True, NOON)])
def test_a_line_says_whether_its_token_may_write(may_write, expires):
    line = token_line(new_token(), "alice", expires=expires, may_write=may_write)
    assert ("access=read" in line) is not may_write
    read = parse_line(line)
    assert (read.may_write, read.expires is None) == (may_write, expires is None)
    assert parse_line(f"sha256:{'0' * 64} alice access=write").may_write


@pytest.mark.parametrize("more", [{}, {"may_write": False}, {"expires": NOON}, {"may_write": False, "expires": NOON}])
def test_a_line_says_whose_runs_its_token_opens(more):
    read = parse_line(token_line(new_token(), "alice", tenant="acme-2", **more))
    assert (read.tenant, read.may_write) == ("acme-2", more.get("may_write", True))
    assert parse_line(token_line(new_token(), "alice", **more)).tenant == ""


@pytest.mark.parametrize("tenant", ["Acme", "a.b", "a" * 21, "acme-", "2a", "a b", "a/b", "ä"])
def test_a_tenant_that_would_make_no_name_is_refused(tenant):
    assert not is_tenant(tenant)
    with pytest.raises(ValueError):
        token_line(new_token(), "alice", tenant=tenant)


def test_expiry_is_to_the_second(tmp_path):
    path, token = tmp_path / "tokens", new_token()
    path.write_text(token_line(token, "alice", expires=NOON))
    now = [NOON.timestamp() - 1]
    accepted = TokensFile(path, field="F", clock=lambda: now[0])
    found = accepted.find(token)
    assert found is not None
    assert found.name == "alice"
    now[0] += 1
    assert accepted.find(token) is None


@pytest.mark.parametrize("shown", ["mrt_ü", "\udcff\udc80", "日本", ""])
def test_a_token_of_any_bytes_is_just_another_token(tmp_path, shown):
    path, workers = tmp_path / "tokens", tmp_path / "workers"
    path.write_text(token_line(new_token(), "alice"))
    workers.write_text(new_token())
    assert TokensFile(path, field="F").find(shown) is None
    assert WorkersFile(workers, field="W").find(shown) is None
    assert WorkersFile(workers, field="W").find_engine(shown) is None


def test_every_line_is_compared(tmp_path, monkeypatch):
    """Where a token is in the file does not show in the time that it takes."""
    path = tmp_path / "tokens"
    made = [new_token() for _ in range(5)]
    path.write_text("\n".join(token_line(token, "x") for token in made))
    accepted = TokensFile(path, field="F")
    compared: list[bytes] = []
    stock = tokens.hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return stock(one, other)

    monkeypatch.setattr(tokens.hmac, "compare_digest", compare)
    for token in (made[0], made[-1], new_token()):
        compared.clear()
        accepted.find(token)
        assert len(compared) == 5


@pytest.mark.parametrize("content", [None, "", "# nothing\n", "nonsense\n", b"\xff\xfe"])
def test_a_wrong_file_keeps_a_server_from_starting(tmp_path, content):
    path = tmp_path / "tokens"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(InvalidSpecError) as caught:
        TokensFile(path, field="MILLRACE_TOKENS_FILE")
    assert caught.value.violations[0].field == "MILLRACE_TOKENS_FILE"
    assert caught.value.violations[0].value == str(path)
    assert "nonsense" not in str(caught.value)


def test_a_settled_file_is_not_read_again_and_a_swapped_link_is(tmp_path, monkeypatch):
    """As Kubernetes does it: the file is a link to a directory that is exchanged."""
    one, two = new_token(), new_token()
    for name, token in (("v1", one), ("v2", two)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens").write_text(token_line(token, name))
        os.utime(tmp_path / name / "tokens", (1_700_000_000, 1_700_000_000))  # same size, same time
    data = tmp_path / "data"
    data.symlink_to("v1")
    accepted = TokensFile(data / "tokens", field="F")
    assert accepted.find(one)
    reads: list[Path] = []
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *how: (reads.append(path), opened(path, *how))[1])
    for _ in range(10):
        assert accepted.find(one)
    assert reads == []
    fresh = tmp_path / "fresh"
    fresh.symlink_to("v2")
    fresh.rename(data)
    assert accepted.find(two) and reads
    assert accepted.find(one) is None


def test_workers_accept_every_line_and_send_the_first(tmp_path):
    path, old, new = tmp_path / "workers", new_token(), new_token()
    path.write_text(f"{new}\n{old}\n")
    accepted = WorkersFile(path, field="F")
    assert accepted.find(old)
    assert accepted.find(new)
    assert SecretFile(path, field="F").read() == new


def test_a_secret_that_goes_away(tmp_path):
    path = tmp_path / "mine"
    path.write_text(new_token())
    secret = SecretFile(path, field="MILLRACE_TOKEN_FILE")
    path.unlink()
    with pytest.raises(UnavailableError, match="MILLRACE_TOKEN_FILE"):
        secret.read()


@pytest.mark.parametrize("text", ["short", "with blank " + "x" * 40, "ü" * 40, ""])
def test_what_is_no_token(text):
    with pytest.raises(ValueError, match="must be a token"):
        parse_secret(text)


def test_durations():
    assert parse_duration("30d") == datetime.timedelta(days=30)
    assert parse_duration("2w") == datetime.timedelta(weeks=2)
    assert parse_duration("90m") == datetime.timedelta(minutes=90)
    for wrong in ("", "30", "0d", "-1d", "1y", "1.5h"):
        with pytest.raises(ValueError, match="such as 30d"):
            parse_duration(wrong)
