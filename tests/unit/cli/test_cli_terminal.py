"""What `millrace run ...` looks like on a terminal, and what programs get instead."""

import io
import json
import re
from collections.abc import Iterator

import pytest

from millrace.cli.main import main
from millrace.cli.view.output import Paint, curve_lines
from millrace.cli.view.text import curve, table
from millrace.errors import UnavailableError
from millrace.rpc.status import abort
from millrace.v1 import run_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace_testing.runlog.fake_runs import FakeRuns, serving

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[FakeRuns]:
    servicer = FakeRuns()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with serving(servicer) as address:
        monkeypatch.setenv("MILLRACE_SERVER", address)
        yield servicer


def drawn(monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    """Return what a terminal gets."""
    terminal = Terminal()
    with monkeypatch.context() as changed:
        changed.setattr("sys.stdout", terminal)
        assert main(["run", *argv]) == 0
    return terminal.getvalue()


def lines_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["run", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_show_draws_curves_on_a_terminal_and_nowhere_else(server, monkeypatch, capsys):
    server.add("alpha", run_pb2.RUN_STATE_FAILED)
    text = drawn(monkeypatch, "show", "alpha")
    plain = COLOUR.sub("", text).splitlines()
    assert "  curve      0.75      ▁▃▆█" in plain and "loss         0.25      █▆▃▁" in plain
    assert "\x1b[31m\x1b[1mFAILED\x1b[0m" in text
    elsewhere = lines_of(capsys, "show", "alpha")
    assert [line for line in plain if not re.search("[▁█]", line)] == elsewhere, "the same lines, without the curves"


def test_show_draws_the_curve_of_each_evaluation(server, monkeypatch):
    evaluation = {"env": [{"name": "letters"}, {"name": "hard\x1b[2J"}]}
    server.add("alpha").config_json = json.dumps({"orchestrator": {"eval": evaluation}})
    lines = COLOUR.sub("", drawn(monkeypatch, "show", "alpha")).splitlines()
    at = lines.index("  curve      0.75      ▁▃▆█")
    assert lines[at + 1] == "eval         0.25      ▁█  letters"
    assert re.fullmatch(r"eval +0\.25 +▁█  hard\S+", lines[at + 2]) and "\x1b" not in lines[at + 2]
    assert lines[at + 3].startswith("loss")


@pytest.mark.parametrize("config", ["{}", '{"orchestrator": null}', '{"orchestrator": {"eval": {"env": 7}}}'])
def test_a_run_that_is_not_evaluated_has_no_such_curve(server, monkeypatch, config):
    server.add("alpha").config_json = config
    text = drawn(monkeypatch, "show", "alpha")
    assert "▁▃▆█" in text and "\neval " not in text


def test_no_color_is_respected(server, monkeypatch):
    server.add("alpha")
    monkeypatch.setenv("NO_COLOR", "1")
    for argv in (["show", "alpha"], ["list"]):
        assert not COLOUR.search(drawn(monkeypatch, *argv))
    assert "▁▃▆█" in drawn(monkeypatch, "show", "alpha"), "the curves stay"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "▁▃▆█" not in drawn(monkeypatch, "show", "alpha")


def test_columns_stand_under_each_other_in_colours(server, monkeypatch, capsys):
    server.add("alpha")
    server.add("beta-with-a-long-name", run_pb2.RUN_STATE_SUCCEEDED)
    text = drawn(monkeypatch, "list")
    assert "\x1b[32m" in text and COLOUR.sub("", text).splitlines() == lines_of(capsys, "list")


class UnreadableRuns(FakeRuns):
    """Its log cannot be read at the moment."""

    async def ListMetrics(self, request, context):
        await abort(context, UnavailableError("the log of the run cannot be read now", reason="LOG_UNREADABLE"))
        return rs.ListMetricsResponse()  # not reached


def test_show_says_why_it_has_no_curves(monkeypatch):
    servicer = UnreadableRuns()
    servicer.add("alpha")
    monkeypatch.setenv("TERM", "xterm")
    with serving(servicer) as address:
        text = COLOUR.sub("", drawn(monkeypatch, "show", "alpha", "--server", address))
    assert "curves       – (the log of the run cannot be read now)" in text.splitlines()


def test_samples_are_coloured_by_what_came_of_them():
    paint = Paint(is_on=True)
    rows = [["0-0", "ok", "1.000"], ["0-1", "env_error", "0.000"]]
    text = table(rows, header=["id", "status", "reward"], paint=paint.sample_cell)
    assert "\x1b[32mok       \x1b[0m" in text and "\x1b[31menv_error\x1b[0m" in text
    assert COLOUR.sub("", text) == table(rows, header=["id", "status", "reward"])
    assert Paint()("x", "red") == "x"


def test_events_and_waits_as_json(server, capsys):
    server.add("alpha", run_pb2.RUN_STATE_SUCCEEDED)
    logged = [json.loads(line) for line in lines_of(capsys, "logs", "alpha", "-f", "--format", "json")]
    assert len(logged) == len(server.events) and all(event["writer"] and event["time"] for event in logged)
    *watched, last = [json.loads(line) for line in lines_of(capsys, "watch", "alpha", "--format", "json")]
    assert watched == logged
    assert (last["summary"]["state"], last["summary"]["steps"]) == ("SUCCEEDED", 3)
    why = json.loads("\n".join(lines_of(capsys, "why", "alpha", "-o", "json")))
    assert why["waits"][0]["waitsOn"] == "orchestrator" and why["summary"]


def test_a_failed_run_that_is_watched_as_json_is_1(server, capsys):
    server.add("alpha", run_pb2.RUN_STATE_CANCELLED)
    server.events = []
    assert main(["run", "watch", "alpha", "-o", "json"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and json.loads(out[0])["summary"]["steps"] == 0


def test_long_and_short_curves():
    assert curve([0, 1, 2, 3], width=8, low=0, high=3) == "▁▃▆█"
    assert curve([0, 0, 3, 3], width=2, low=0, high=3) == "▁█"
    assert len(curve(list(range(1000)), width=20, low=0, high=999)) == 20
    assert curve([1.0, float("nan")], width=8, low=1, high=1) == "▁!"
    assert curve_lines({"step": [0], "reward/mean": [None]}) == []
