"""Commands that name no server find the stacks that run here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.cli.connection import choose_stack, read_stack, running_stacks, server_address, shared_address
from millrace.cli.errors import CliError
from millrace.cli.main import main
from millrace.cli.offline.run_store import store_of
from millrace.errors import NotFoundError
from millrace.storage import open_store
from millrace_testing.local.stack_files import write_stack


def test_a_run_of_its_own_is_found_and_the_environment_goes_first(tmp_path):
    write_stack(tmp_path / "alpha-1", "127.0.0.1:7001", is_durable=False)
    assert server_address(None, environ={}, root=tmp_path) == ("127.0.0.1:7001", f"{tmp_path}/alpha-1/stack.json")
    assert server_address(None, environ={"MILLRACE_SERVER": "h:1"}, root=tmp_path) == ("h:1", "MILLRACE_SERVER")
    assert server_address("h:2", environ={}, root=tmp_path) == ("h:2", "--server")
    assert server_address(None, environ={}, root=tmp_path / "none") == ("127.0.0.1:50051", "the default")


def test_a_stack_below_another_output_directory_is_found(tmp_path):
    write_stack(tmp_path / "sweep" / "alpha-1", "127.0.0.1:7001")
    assert [stack.address for stack in running_stacks(tmp_path)] == ["127.0.0.1:7001"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"address": 3}', '{"address": "h:1", "pid": "1", "start_ticks": 0}', '{"pid": 1}', "\x00"],
)
def test_what_cannot_be_read_is_no_stack(tmp_path, text):
    (tmp_path / "stack.json").write_text(text)
    assert read_stack(tmp_path) is None


def test_a_file_that_a_killed_stack_has_left_is_ignored(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_stack(tmp_path / "gone", "127.0.0.1:1", pid=ended.pid)
    write_stack(tmp_path / "another-process-has-its-number", "127.0.0.1:1", start_ticks=1)
    write_stack(tmp_path / "no-number", "127.0.0.1:1", pid=1 << 70)
    assert running_stacks(tmp_path) == []


def test_of_several_one_is_to_be_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLRACE_SERVER", raising=False)
    write_stack(Path("outputs/alpha-1"), "127.0.0.1:7001", is_durable=False)
    write_stack(Path("outputs/local"), "127.0.0.1:7002", is_durable=True)
    for words in (["run", "list"], ["run", "why", "-"], ["doctor"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "2 stacks run here" in said and "--server 127.0.0.1:7001" in said, words
        assert f"127.0.0.1:7001        outputs/alpha-1 (of alpha-1 alone, pid {os.getpid()})" in said
        assert f"127.0.0.1:7002        outputs/local (millrace up, pid {os.getpid()})" in said
    assert main(["dashboard", "--no-browser"]) == 2
    assert "--dir outputs/alpha-1" in capsys.readouterr().err


def test_the_name_of_a_run_says_which_of_several_is_meant(tmp_path):
    write_stack(tmp_path / "alpha-1", "127.0.0.1:7001", is_durable=False)
    write_stack(tmp_path / "alpha-12", "127.0.0.1:7002", is_durable=False)
    for run, address in {"alpha-1": 7001, "runs/alpha-1": 7001, "alpha-12": 7002}.items():
        found = choose_stack(run, root=tmp_path)
        assert found is not None and found.address == f"127.0.0.1:{address}"
    with pytest.raises(CliError, match="2 stacks run here"):
        choose_stack("alpha", root=tmp_path)
    write_stack(tmp_path / "local", "127.0.0.1:7003", is_durable=True)
    others = choose_stack("beta", root=tmp_path)
    assert others is not None and others.address == "127.0.0.1:7003", "those of others are in the stack of all"


def test_a_run_is_submitted_to_a_stack_that_stays(tmp_path):
    write_stack(tmp_path / "alpha-1", "127.0.0.1:7001", is_durable=False)
    assert shared_address(tmp_path) == "127.0.0.1:50051"
    write_stack(tmp_path / "mine", "127.0.0.1:7002", is_durable=True)
    assert shared_address(tmp_path) == "127.0.0.1:7002"


def test_an_environment_beside_the_client_is_named_where_the_stack_looks_elsewhere(tmp_path, monkeypatch, capsys):
    from millrace.cli.session.prepare import prepare

    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text("")
    groups = "[orchestrator]\nrollouts_per_example = 8\nbatch_size = 8\n"
    Path("rl.toml").write_text(f'[model]\nname = "org/model"\n{groups}[[orchestrator.env]]\nid = "my-env"\n')

    def said(**says) -> str:
        write_stack(Path("outputs/local"), "127.0.0.1:7002", **says)
        prepare(["@", "rl.toml", "--server", "127.0.0.1:7002"], environ={})
        return capsys.readouterr().err

    assert "./my_env.py is here, and the stack at 127.0.0.1:7002 looks in /srv and its venv /srv/.venv" in said(
        looks_in=["/srv", "/srv/.venv"]
    )
    assert "looks where its env-servers run" in said(looks_in=3)
    assert "my_env.py" not in said(looks_in=[str(tmp_path), "/srv/.venv"])
    Path("my_env.py").unlink()
    assert "my_env" not in said(looks_in=["/srv", "/srv/.venv"])


def test_the_store_of_the_stack_that_runs_here_is_read(tmp_path, monkeypatch):
    """Also where its directory is another than the default, and where MILLRACE_SERVER names it."""
    monkeypatch.chdir(tmp_path)
    for name in ("MILLRACE_SERVER", "MILLRACE_STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    store = tmp_path / "outputs/up/store"
    store.mkdir(parents=True)
    write_stack(Path("outputs/up"), "127.0.0.1:7001", is_durable=True, store=store.as_uri())
    assert store_of("third", None)[0].describe() == open_store(store.as_uri()).describe()
    monkeypatch.setenv("MILLRACE_SERVER", "127.0.0.1:7001")
    assert store_of("third", None)[1] == "third"
    monkeypatch.setenv("MILLRACE_SERVER", "elsewhere:7001")
    with pytest.raises(NotFoundError):
        store_of("third", None)
