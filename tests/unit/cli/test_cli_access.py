"""`--token-file`, `--tls-ca`, `--insecure` anywhere in the line, and `millrace token new`."""

import pytest

from millrace.cli import connection
from millrace.cli.errors import CliError
from millrace.cli.main import main
from millrace.rpc.tokens import parse_line, token_digest


@pytest.fixture(autouse=True)
def forget():
    yield
    connection.take_options([])


def test_options_are_taken_from_anywhere():
    line = ["run", "--tls-ca", "ca.pem", "list", "--token-file=t", "--limit", "3", "--insecure"]
    assert connection.take_options(line) == ["run", "list", "--limit", "3"]
    assert connection.environ({"A": "b"}) == {
        "A": "b",
        "MILLRACE_TLS_CA": "ca.pem",
        "MILLRACE_TOKEN_FILE": "t",
        "MILLRACE_INSECURE": "1",
    }
    assert connection.take_options(["run", "list"]) == ["run", "list"]
    assert connection.environ({}) == {}


@pytest.mark.parametrize("line", [["run", "list", "--tls-ca"], ["--token-file", "--tls-ca", "x"], ["--token-file="]])
def test_an_option_without_its_file(line):
    with pytest.raises(CliError, match="needs a file"):
        connection.take_options(line)


@pytest.mark.parametrize("line", [["run", "list", "--token", "mrt_secret"], ["run", "list", "--token=mrt_secret"]])
def test_a_token_in_the_command_line_is_refused_and_not_repeated(line, capsys):
    assert main(line) == 2
    captured = capsys.readouterr()
    assert "--token-file" in captured.err
    assert "mrt_secret" not in captured.err


def test_token_new_prints_the_token_apart_from_its_line(capsys):
    assert main(["token", "new", "--name", "alice", "--expires", "30d"]) == 0
    captured = capsys.readouterr()
    token = captured.out.strip()
    line = next(line for line in captured.err.splitlines() if "sha256:" in line)
    assert parse_line(line).digest == token_digest(token)
    assert parse_line(line).expires is not None
    assert token not in captured.err
    assert parse_line(line).may_write


def test_token_new_makes_one_of_a_tenant(capsys):
    assert main(["token", "new", "--name", "bob", "--tenant", "acme"]) == 0
    assert " bob tenant=acme\n" in capsys.readouterr().err
    assert main(["token", "new", "--name", "bob", "--tenant", "Acme.2"]) != 0
    assert "--tenant" in capsys.readouterr().err


def test_token_new_makes_one_that_may_only_read(capsys):
    assert main(["token", "new", "--name", "guests", "--read-only"]) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if "sha256:" in line)
    assert not parse_line(line).may_write


@pytest.mark.parametrize("options", [["--name", "a b"], ["--name", "a", "--expires", "soon"], []])
def test_token_new_says_what_is_wrong(options, capsys):
    assert main(["token", "new", *options]) == 2
    assert "--name" in capsys.readouterr().err or "--expires" in options


def test_a_missing_token_file_is_named(capsys, tmp_path):
    missing = str(tmp_path / "nothing")
    assert main(["run", "list", "--server", "127.0.0.1:1", "--token-file", missing]) == 2
    err = capsys.readouterr().err
    assert missing in err
    assert "MILLRACE_TOKEN_FILE" in err


def test_a_token_is_not_sent_in_plain_text_beyond_this_machine(capsys, tmp_path):
    path = tmp_path / "token"
    path.write_text("mrt_" + "x" * 43)
    assert main(["run", "list", "--server", "orchestrator.example:50051", "--token-file", str(path)]) == 2
    err = capsys.readouterr().err
    assert "plain text" in err
    assert "remedy:" in err
