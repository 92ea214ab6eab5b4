"""`millrace run logs RUN --component`: which lines are shown, from which file, and how they are followed."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.cli.log_files import LevelLines, LogQuery, LogTail, RunLines, show_own
from millrace.cli.main import main
from millrace.local.directory import StackId
from millrace.local.keeper import keep_bounded, old_of, rotate
from millrace.telemetry import waits
from millrace.telemetry.logging import bound
from millrace_testing.local.stack_files import write_stack
from millrace_testing.polling import until
from millrace_testing.runlog.fake_runs import FakeRuns, serving

OWN = "2026-01-02T03:04:05.678Z INFO trainer step completed run=uid-alpha step=1"
OTHER = "2026-01-02T03:04:05.678Z ERROR trainer it broke run=uid-beta"
SERVICE = "2026-01-02T03:04:05.678Z INFO trainer serving"


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[FakeRuns]:
    """Yield an orchestrator whose stack works in `outputs/local`, and has the run alpha."""
    servicer = FakeRuns()
    servicer.add("alpha")
    monkeypatch.chdir(tmp_path)
    Path("outputs/local/logs").mkdir(parents=True)
    with serving(servicer) as address:
        monkeypatch.setenv("MILLRACE_SERVER", address)
        write_stack(Path("outputs/local"), address, logs=str(Path("outputs/local/logs").resolve()), is_durable=True)
        yield servicer


def logs(capsys, *arguments: str) -> tuple[int, list[str], str]:
    code = main(["run", "logs", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def write(path: str, *lines: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_of_a_shared_stack_only_the_lines_of_the_run(server, capsys):
    frames = ["Traceback (most recent call last):", "ValueError: no"]
    write("outputs/local/logs/trainer.log", SERVICE, OWN, *frames, OTHER, *frames, json.dumps({"run": "uid-alpha"}))
    write("outputs/local/logs/trainer-2.log", json.dumps({"run": "uid-beta"}), json.dumps({"run": "alpha", "msg": "x"}))
    write("outputs/local/logs/orchestrator.log", OWN)
    code, out, err = logs(capsys, "alp", "--component", "trainer")
    assert code == 0 and "only lines of alpha" in err
    assert out == [
        'trainer-2: {"run": "alpha", "msg": "x"}',
        *(f"trainer: {line}" for line in (OWN, *frames, '{"run": "uid-alpha"}')),
    ]
    _, out, err = logs(capsys, "alpha", "--component", "orchestrator")
    assert out == [OWN]
    _, out, err = logs(capsys, "alpha", "--component", "trainer", "--all", "-n", "2")
    assert out == [f"trainer: {frames[1]}", 'trainer: {"run": "uid-alpha"}'] and err == ""


def test_of_a_stack_of_its_own_every_line_and_no_server_is_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLRACE_SERVER", "127.0.0.1:1")
    write("outputs/mine/logs/trainer.log", SERVICE, "\x1b[31mred\x1b[0m\x07 and\tplain")
    for name in ("mine", "mi", "outputs/mine", "-"):
        assert logs(capsys, name, "--component", "trainer") == (0, [SERVICE, "red and\tplain"], "")
    write("outputs/mine/logs/trainer.log.1", "before")
    assert logs(capsys, "mine", "--component", "trainer", "-n", "3")[1][0] == "before"
    assert logs(capsys, "mine", "--component", "inference") == (0, [], "")


def test_an_unknown_component_is_named_with_those_that_there_are(server, capsys):
    write("outputs/local/logs/redis.log", "Ready")
    code, out, err = logs(capsys, "alpha", "--component", "trianer")
    assert (code, out) == (2, [])
    assert "no component is called 'trianer'; there are orchestrator, env-server, inference, trainer" in err
    assert "beside them are redis" in err and "leave --component out" in err


def test_of_services_elsewhere_it_says_the_commands_and_what_they_told(server, capsys):
    Path("outputs/local/stack.json").unlink()
    code, out, err = logs(capsys, "alpha", "--component", "trainer")
    assert code == 0 and out and all("trainer-0" in line for line in out)
    assert "docker compose logs trainer | grep uid-alpha" in err
    assert "app.kubernetes.io/component=trainer --prefix --tail=-1 | grep uid-alpha" in err


def test_a_line_belongs_to_the_run_that_it_names_itself():
    lines = RunLines("uid-alpha", "alpha")
    assert lines.has(OWN) and lines.has("  a frame")
    assert not lines.has(SERVICE) and not lines.has("  a frame")
    assert not lines.has("{no json") and lines.has('{"run": "runs/alpha"}')
    assert not lines.has("2026-01-02T03:04:05.678Z INFO trainer x run=uid-alphabet")


def test_work_of_a_run_marks_its_lines():
    with waits.of_run("u"):
        assert bound("run") == "u"
    assert bound("run") is None


def test_a_tail_repeats_and_misses_nothing_while_a_process_writes_and_its_log_is_rotated(tmp_path):
    path = tmp_path / "trainer.log"
    script = (
        "import itertools, os, select\n"
        "for n in itertools.count():\n"
        "    os.write(1, b'line %d\\n' % n)\n"
        "    if select.select([0], [], [], 0)[0]: break"
    )
    tail, found, rotations = LogTail(path), [], 0
    with path.open("ab") as sink:
        process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=sink)
        while rotations < 3:
            found += tail.read()
            rotations += rotate(path, max_bytes=10_000)
        process.communicate(timeout=60)
    found += [*tail.read(), *tail.finish()]
    numbers = [int(line.removeprefix("line ")) for line in found]
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    assert rotations > 1 and numbers[0] == 0 and min(steps) == 1
    # What was written between the copy and the emptying of a file is lost, and nothing else.
    assert sum(step > 1 for step in steps) <= rotations


def test_a_line_that_is_not_whole_is_kept_for_later(tmp_path):
    path = tmp_path / "x.log"
    tail = LogTail(path)
    assert list(tail.read()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.read()) == ["one"]
    rotate(path, max_bytes=1)
    with path.open("ab") as file:
        file.write(b"o\nthree")
    assert list(tail.read()) == ["two"]
    assert list(tail.finish()) == ["three"] and list(tail.finish()) == []


async def test_following_survives_a_rotation_and_ends_with_the_stack(tmp_path, capsys):
    path = tmp_path / "x" / "logs" / "trainer.log"
    write(str(path), "old", "first")
    lock = tmp_path / "x" / ".lock"
    lock.write_text(str(StackId.new(tmp_path)))
    query = LogQuery(component="trainer", is_follow=True, lines=1)
    following = asyncio.create_task(show_own(path.parent, query))
    shown: list[str] = []

    async def until(line: str) -> None:
        async with asyncio.timeout(20):
            while line not in shown:
                await asyncio.sleep(0.02)
                shown.extend(capsys.readouterr().out.splitlines())

    await until("first")
    write(str(path), "second")
    assert rotate(path, max_bytes=1)
    write(str(path), "third")
    await until("third")
    write(str(path.with_name("trainer-rank-1.log")), "from another rank")
    await until("trainer-rank-1: from another rank")
    lock.unlink()
    write(str(path), "last")
    await asyncio.wait_for(following, 20)
    shown.extend(capsys.readouterr().out.splitlines())
    assert shown == ["first", "second", "third", "trainer-rank-1: from another rank", "trainer: last"]


async def test_a_stack_keeps_its_logs_bounded(tmp_path):
    path, told = tmp_path / "trainer.log", []
    path.write_bytes(b"x" * 1000)
    (tmp_path / "small.log").write_bytes(b"x")
    refused = tmp_path / "refused.log"
    refused.write_bytes(b"x" * 1000)
    old_of(refused).mkdir()
    (old_of(refused) / "file").touch()
    keeping = asyncio.create_task(keep_bounded(tmp_path, note=told.append, max_bytes=100, period_s=0.01))
    await until(lambda: told and not path.stat().st_size, timeout_s=20)
    await asyncio.sleep(0.1)
    keeping.cancel()
    assert old_of(path).stat().st_size == 1000 and not old_of(tmp_path / "small.log").exists()
    assert len(told) == 1 and "refused.log cannot be rotated" in told[0]


def test_lines_of_a_level_and_what_belongs_to_them():
    shown = LevelLines("warning")
    lines = [
        "2026-01-01T00:00:00.000Z INFO trainer step done",
        "2026-01-01T00:00:00.000Z WARNING trainer slow",
        "  a frame",
        "2026-01-01T00:00:00.000Z DEBUG trainer detail",
        "  its frame",
        '{"level": "ERROR", "message": "x"}',
        '{"level": "INFO", "message": "x"}',
    ]
    assert [shown.has(line) for line in lines] == [False, True, True, False, False, True, False]


def test_events_by_level(server, capsys):
    everything, warnings = logs(capsys, "alpha")[1], logs(capsys, "alpha", "--level", "warning")[1]
    assert len(warnings) < len(everything) and all("warning: " in line or "rollouts fail" in line for line in warnings)
    assert logs(capsys, "alpha", "--level", "error")[1] == []
