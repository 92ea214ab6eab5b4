"""Runs whose own stack has ended are told from the log that is there."""

import hashlib
import json
from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace.local.directory import free_ports
from millrace.runlog.event_archive import encode_archive
from millrace.runlog.names import Deployment, Names
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.redis.entry import Entry
from millrace.storage.local import LocalStore
from millrace.v1 import event_pb2
from millrace_testing.local.stack_files import write_stack
from millrace_testing.runlog.recorded_run import recorded

UID = "01a205f04e00c6b2d345401dca64"


def store_run(directory: Path, *, events: int | None = None) -> None:
    """A directory as `millrace rl` leaves it, with the first so many events of a recorded run."""
    store, name = LocalStore(directory / "store"), directory.name
    names = Names("millrace", UID)
    record = RunRecord(uid=UID, name=name, kind="RL", config={"max_steps": 3}, create_time="2026-01-01T00:00:00Z")
    store.create(Deployment("millrace").name_object(name), UID.encode())
    store.create(names.run_json, record.encode())
    entries = []
    for number, event in enumerate(recorded()[:events]):
        data = event.SerializeToString()
        entries.append(Entry(id=f"1-{number}", v=1, h=hashlib.sha256(data).hexdigest(), d=data, tp=""))
    store.create(names.archived_events(entries[0].id, entries[-1].id), encode_archive(entries))


@pytest.fixture(autouse=True)
def _nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLRACE_SERVER", raising=False)
    monkeypatch.setattr("millrace.cli.connection.DEFAULT_LISTEN", f"127.0.0.1:{free_ports(1)[0]}")


@pytest.mark.parametrize("name", ["one", "on", "-", "outputs/one", "runs/one"])
def test_commands_read_the_run_that_is_meant(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"))
    for command in ("why", "logs", "watch", "show"):
        assert main(["run", command, name]) == 0, command
        shown = capsys.readouterr()
        assert "SUCCEEDED" in shown.out, command
        assert "the stack of runs/one has ended; read from its log in outputs/one" in shown.err, command


def test_json_is_that_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"))
    assert main(["run", "logs", "one", "--format", "json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(recorded()) and lines[0]["stateChanged"]["newState"] == "RUN_STATE_STARTING"
    assert main(["run", "show", "one", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["progress"]["step"] == "3"
    assert main(["run", "why", "one", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"summary": "run one has ended as SUCCEEDED"}
    assert main(["run", "watch", "one", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]["state"] == "SUCCEEDED"


def test_a_stack_that_was_killed_leaves_a_run_that_may_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"), events=7)
    write_stack(Path("outputs/one"), "127.0.0.1:7001", start_ticks=1)
    assert main(["run", "why", "one"]) == 0
    said = "its stack was stopped or killed while it was RUNNING, after step 1; it goes on with the command that it was"
    assert said in capsys.readouterr().out
    assert main(["run", "watch", "one"]) == 1
    assert "--name one --resume" in capsys.readouterr().err
    for command in ("resume", "pause", "cancel"):
        assert main(["run", command, "one"]) == 1
        said = capsys.readouterr().err
        assert "nothing works on it" in said and "remedy: the command that it was started with" in said


def test_a_run_that_is_not_there_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"))
    assert main(["run", "samples", "nobody"]) == 3
    assert "none of the runs below outputs/ is 'nobody': there is one\n" in capsys.readouterr().err


def test_several_of_one_name_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"))
    store_run(Path("outputs/sweep/one"))
    assert main(["run", "why", "one"]) == 2
    said = capsys.readouterr().err
    assert "2 ended local runs are called 'one':\n  - outputs/one\n  - outputs/sweep/one\n" in said
    assert "remedy: name one by its directory, such as outputs/one" in said
    assert main(["run", "why", "outputs/sweep/one"]) == 0


def test_it_is_said_where_was_looked(capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"))
    assert main(["run", "why", "two"]) == 5
    said = capsys.readouterr().err
    assert "cannot reach the orchestrator" in said and "none of the ended local runs below outputs/ is 'two'" in said
    assert "a local run that wrote elsewhere is named by its directory" in said


@pytest.mark.parametrize("question", [("why", "one"), ("list",)])
def test_a_server_that_is_named_is_asked_alone(capsys: pytest.CaptureFixture[str], question: tuple[str, ...]) -> None:
    store_run(Path("outputs/one"))
    assert main(["run", *question, "--server", f"127.0.0.1:{free_ports(1)[0]}"]) == 5
    assert "outputs" not in capsys.readouterr().err


def test_an_event_of_an_unknown_kind_is_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"))
    store = LocalStore(Path("outputs/one/store"))
    data = event_pb2.Event(writer="w", writer_sequence=1).SerializeToString()
    entry = Entry(id="1-900", v=1, h=hashlib.sha256(data).hexdigest(), d=data, tp="")
    store.create(Names("millrace", UID).archived_events("1-900", "1-900"), encode_archive([entry]))
    assert main(["run", "logs", "one"]) == 0
    assert "an event of a kind that this version does not know" in capsys.readouterr().out


def test_the_list_has_them_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"))
    store_run(Path("outputs/broken"))
    (record,) = Path("outputs/broken/store").glob("**/run.json")
    record.write_text("no JSON")
    assert main(["run", "list"]) == 0
    shown = capsys.readouterr()
    header, *lines = shown.out.splitlines()
    assert header.split()[-1] == "STACK" and len(lines) == 1, shown.out
    assert lines[0].split()[:2] == ["one", "SUCCEEDED"] and lines[0].endswith("ended, in outputs/one")
    assert "no stack runs at 127.0.0.1:" in shown.err and "outputs/broken is left out: " in shown.err
    assert main(["run", "list", "--format", "json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["name"] == "runs/one" and run["endedStack"] == "outputs/one"


def test_the_list_has_those_of_a_state_alone(capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"))
    assert main(["run", "list", "--state", "running"]) == 5
    store_run(Path("outputs/killed"), events=7)
    capsys.readouterr()
    assert main(["run", "list", "--state", "running"]) == 0
    shown = capsys.readouterr().out
    assert "killed" in shown and "one" not in shown.replace("STACK", "")


def test_a_log_says_which_processes_its_short_names_stand_for(capsys: pytest.CaptureFixture[str]) -> None:
    store_run(Path("outputs/one"))
    store = LocalStore(Path("outputs/one/store"))
    event = event_pb2.Event(writer="orchestrator-node-7-412-9f3ac1d2", writer_sequence=1)
    data = event.SerializeToString()
    entry = Entry(id="1-900", v=1, h=hashlib.sha256(data).hexdigest(), d=data, tp="")
    store.create(Names("millrace", UID).archived_events("1-900", "1-900"), encode_archive([entry]))
    assert main(["run", "logs", "one"]) == 0
    shown = capsys.readouterr()
    assert "  orchestrator-1  " in shown.out and "9f3ac1d2" not in shown.out
    assert "note: orchestrator-1 is orchestrator-node-7-412-9f3ac1d2" in shown.err
