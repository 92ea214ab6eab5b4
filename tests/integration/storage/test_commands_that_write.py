"""Commands that write into a store by themselves refuse one that cannot carry runs, before they write there."""

from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace_testing.s3_answers import s3_answers

COMMANDS = {"repair": ["run", "repair", "some", "--apply"], "attest": ["run", "attest", "some", "--key", "KEY"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_store_without_conditions_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "test")
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    with s3_answers() as (handler, port):
        handler.has_conditions = False
        argv = [str(key) if word == "KEY" else word for word in COMMANDS[name]]
        assert main([*argv, "--store", f"s3://b?endpoint=http://127.0.0.1:{port}&region=us-east-1"])
        assert not [stored for stored in handler.stored if "/self-test/" not in stored]
    assert "create-only PUT" in capsys.readouterr().err
