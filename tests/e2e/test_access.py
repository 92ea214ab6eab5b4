"""The one-machine stack with TLS, client certificates and tokens everywhere: it trains, and strangers learn nothing."""

import pytest

from millrace.rpc.tokens import new_token, token_line
from millrace_testing.certificates import Authority
from millrace_testing.workplaces import EXAMPLES, Workplace

BASE = "outputs/reverse-text/base"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_protected_stack_trains_and_refuses_strangers(make_workplace):
    place: Workplace = make_workplace("access")
    place.run(str(EXAMPLES / "make_model.py"), "--seed", "0")
    secrets = place.path / "secrets"
    secrets.mkdir()
    authority = Authority(secrets)
    pair = authority.issue("stack")
    mine, workers, foreign = new_token(), new_token(), new_token()
    (secrets / "mine").write_text(mine)
    (secrets / "foreign").write_text(foreign)
    (secrets / "workers").write_text(workers)
    (secrets / "tokens").write_text(token_line(mine, "alice") + "\n")
    certificate = {"MILLRACE_TLS_CERT": str(pair.cert), "MILLRACE_TLS_KEY": str(pair.key)}
    protected = certificate | {
        "MILLRACE_TLS_CA": str(authority.path),
        "MILLRACE_TLS_CLIENT_CA": str(authority.path),
        "MILLRACE_TOKENS_FILE": str(secrets / "tokens"),
        "MILLRACE_WORKER_TOKEN_FILE": str(secrets / "workers"),
    }
    known = ("--tls-ca", str(authority.path), "--token-file", str(secrets / "mine"))
    with place.up(env=protected) as address:
        there = {"MILLRACE_SERVER": address, **certificate}
        submit = (
            "run",
            "submit",
            "@",
            place.rl_toml,
            "--model.name",
            BASE,
            "--max-steps",
            "2",
            "--name",
            "guarded",
            "--follow",
            "--plain",
        )
        output = place.millrace(*submit, *known, env=there)
        assert "summary.json" in output
        assert "guarded" in place.millrace("run", "list", *known, env=there)
        assert "audit clean" in place.millrace("run", "audit", "guarded", *known, env=there)
        strangers = {
            "wrong token": (4, (*known[:2], "--token-file", str(secrets / "foreign")), certificate),
            "no token": (4, known[:2], certificate),
            "no certificate": (5, known, {}),
            "plain text": (5, known[2:], certificate),
        }
        for who, (expected, options, env) in strangers.items():
            code, output = place.attempt(
                "-m", "millrace.cli", "run", "list", *options, env=env | {"MILLRACE_SERVER": address}
            )
            assert code == expected, f"{who}: {output}"
            assert "guarded" not in output
            assert "remedy:" in output
        for process in place.processes():
            assert not any(secret in " ".join(process.cmdline()) for secret in (mine, workers))
    for path in place.path.rglob("*"):
        if path.is_file() and secrets not in path.parents:
            content = path.read_bytes()
            assert not any(secret.encode() in content for secret in (mine, workers, foreign)), path
