"""`millrace run ...` against a RunService in another thread: what is printed where, and the exit codes."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.cli.log_files import process_logs
from millrace.cli.main import main
from millrace.cli.options import choose
from millrace.client import runs
from millrace.errors import NotFoundError
from millrace.v1 import run_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace_testing.local.stack_files import write_stack
from millrace_testing.runlog.fake_runs import FakeRuns, serving
from millrace_testing.runlog.recorded_run import state


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[FakeRuns]:
    servicer = FakeRuns()
    monkeypatch.chdir(tmp_path)
    with serving(servicer) as address:
        monkeypatch.setenv("MILLRACE_SERVER", address)
        yield servicer


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["run", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_list_as_table_and_json(server, capsys):
    server.add("alpha")
    server.add("beta", run_pb2.RUN_STATE_SUCCEEDED)
    code, out, _ = run(capsys, "list")
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["NAME", "STATE", "STEP", "REWARD", "POLICY", "TOKENS", "AGE"]
    assert lines[1].split()[:6] == ["beta", "SUCCEEDED", "2/3", "0.550", "v2", "28.4k"]
    assert lines[2].startswith("alpha")
    code, out, _ = run(capsys, "list", "-o", "json", "--state", "running")
    assert code == 0 and [item["name"] for item in json.loads(out)] == ["runs/alpha"]
    assert json.loads(out)[0]["state"] == "RUN_STATE_RUNNING"
    assert len(run(capsys, "list", "--limit", "1")[1].splitlines()) == 2


def test_list_and_show_say_where_a_run_waits(server, capsys):
    server.add("alpha")
    place = "place 2 of 2 (priority 5): what is free is kept for run runs/gang"
    server.add("waits", run_pb2.RUN_STATE_QUEUED).queue_place = place
    header, *lines = run(capsys, "list")[1].splitlines()
    assert header.split()[-1] == "QUEUE"
    assert [line.endswith(place) for line in lines] == [line.startswith("waits") for line in lines]
    assert f"queue        {place}" in run(capsys, "show", "waits")[1].splitlines()


def test_list_has_a_column_and_a_filter_for_tenants(server, capsys):
    server.add("alpha")
    server.add("acme.beta").tenant = "acme"
    header, *lines = run(capsys, "list")[1].splitlines()
    assert header.split()[-1] == "TENANT"
    assert {line.split()[0]: line.split()[-1] for line in lines} == {"acme.beta": "acme", "alpha": "–"}
    assert [line.split()[0] for line in run(capsys, "list", "--tenant", "acme")[1].splitlines()[1:]] == ["acme.beta"]
    assert "tenant       acme" in run(capsys, "show", "acme.beta")[1].splitlines()


def test_the_beginning_of_a_tenants_run_is_enough(server, capsys):
    server.add("acme.beta").tenant = "acme"
    for name in ("be", "acme.be", "-"):
        assert "runs/acme.beta" in run(capsys, "show", name)[1]
    assert "did you mean beta?" in run(capsys, "show", "bexa")[2]
    server.add("alpha")
    assert "runs/acme.beta" in run(capsys, "show", "acme.be")[1]
    assert "no run 'be'" in run(capsys, "show", "be")[2]


def test_usage_is_shown_by_tenant(server, capsys):
    code, out, _ = run(capsys, "usage")
    header, *lines = out.splitlines()
    assert code == 0 and header.startswith("TENANT")
    assert [line.split() for line in lines] == [
        ["–", "1", "0.00", "5", "0", "0"],
        ["acme", "2", "1.50", "0", "70", str(1 << 40)],
    ]
    assert len(run(capsys, "usage", "--tenant", "acme")[1].splitlines()) == 2
    found = json.loads(run(capsys, "usage", "-o", "json")[1])["tenants"]
    assert found[1] == {
        "tenant": "acme", "numRuns": "2", "acceleratorSeconds": 5400.0, "sampledTokens": "70",
        "storedBytes": str(1 << 40),
    }  # fmt: skip


def test_list_shows_no_reward_of_a_run_without_a_batch_of_its_own(server, capsys):
    server.add("fork", run_pb2.RUN_STATE_QUEUED).progress.num_rollouts = 0
    assert run(capsys, "list")[1].splitlines()[1].split()[:4] == ["fork", "QUEUED", "2/3", "–"]


def test_the_run_that_was_shown_is_deleted(server, capsys):
    server.add("alpha")
    address = os.environ["MILLRACE_SERVER"]
    code, out, _ = run(capsys, "delete", "runs/alpha", "--yes", "--server", address)
    assert code == 0 and "uid uid-alpha" in out and out.splitlines()[-1].endswith("is deleted: 2 objects")
    shown, done = server.deletions
    assert (shown.name, shown.validate_only) == ("runs/alpha", True)
    assert (done.name, done.validate_only) == ("uid-alpha", False), "the name may be another run's by now"


def test_an_empty_loss_is_refused(server, capsys):
    code, _, err = run(capsys, "replay", "alpha", "--step", "1", "--loss", "")
    assert code == 2 and "--loss" in err and "is empty" in err


def test_empty_list_and_unknown_state(server, capsys):
    code, out, err = run(capsys, "list")
    assert (code, out) == (0, "") and err.startswith("no runs: the orchestrator at 127.0.0.1:")
    assert err.endswith(" (MILLRACE_SERVER) has none; `millrace run submit @ FILE` begins one there\n")
    code, out, err = run(capsys, "list", "--state", "running")
    assert (code, out) == (0, "") and err.startswith("no runs that are running: ") and err.endswith(" has none\n")
    assert run(capsys, "list", "-o", "json") == (0, "[]\n", "")
    code, _, err = run(capsys, "list", "--state", "walking")
    assert code == 2 and "'walking' is no state; there are queued, starting, running" in err


def test_show(server, capsys):
    server.add("alpha").error.CopyFrom(run_pb2.RunError(reason="X", message="it broke", component="trainer"))
    code, out, _ = run(capsys, "show", "alpha")
    assert code == 0
    assert "name         runs/alpha" in out and "step         2/3" in out
    assert "checkpoint   step 2  file:///c/2" in out and "error        it broke [X] (trainer)" in out
    code, out, _ = run(capsys, "show", "alpha", "--format", "json")
    assert code == 0 and json.loads(out)["uid"] == "uid-alpha"


@pytest.mark.parametrize("name", ["runs/alpha-1", "alpha-1", "alpha-", "uid-alpha-1"])
def test_names_resolve(server, capsys, name):
    server.add("alpha-1")
    server.add("beta-2")
    assert "runs/alpha-1" in run(capsys, "show", name)[1]


def test_dash_is_the_most_recent(server, capsys):
    code, _, err = run(capsys, "show", "-")
    assert code == 3 and "there is no run yet" in err
    server.add("alpha")
    server.add("beta")
    assert "runs/beta" in run(capsys, "show", "-")[1]


def test_ambiguous_and_unknown_names(server, capsys):
    server.add("alpha-1")
    server.add("alpha-2")
    code, _, err = run(capsys, "show", "alp")
    assert code == 2 and "'alp' begins the names of 2 runs: alpha-1, alpha-2" in err
    code, _, err = run(capsys, "show", "alhpa-1")
    assert code == 3 and "there is no run 'alhpa-1'" in err and "did you mean alpha-1" in err
    with pytest.raises(NotFoundError, match="millrace run list"):
        choose("x", [])


def test_denied_is_4(server, capsys):
    server.is_denied = True
    code, _, err = run(capsys, "show", "alpha")
    assert code == 4 and "you may not see runs" in err and "ask for a token" in err


def test_watch_prints_progress_and_ends_with_the_run(server, capsys):
    server.add("alpha").config_json = '{"orchestrator": {"async_level": 1, "max_off_policy_steps": 2}}'
    code, out, _ = run(capsys, "watch", "alpha")
    assert code == 0
    assert "step   3/3  reward 0.700  staleness 0.8/2" in out
    told, _, closing = out.partition("\n\n")
    assert told.splitlines()[-1] == "STOPPING -> SUCCEEDED  done"
    assert closing.splitlines()[0].split() == ["run", "alpha", "SUCCEEDED"] and "\nsteps            3 in " in closing
    assert "plot" not in closing, "nothing was drawn here"


def test_watch_of_a_queued_run_says_why_at_once_and_when_it_changes(monkeypatch, capsys):
    monkeypatch.setattr(runs, "WHY_QUEUED_PERIOD_S", 0.01)
    server = QueuedRuns()
    server.add("alpha", run_pb2.RUN_STATE_QUEUED)
    with serving(server) as address:
        code, out, _ = run(capsys, "watch", "alpha", "--server", address)
    assert code == 0
    assert out.splitlines()[:2] == ["QUEUED: trainer-0 has run beta", "QUEUED: trainer-0 has run gamma"]
    assert out.count("QUEUED: ") == 2


class QueuedRuns(FakeRuns):
    """Is queued until it has given three answers, two of them equal, and one more is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = ["beta", "beta", "gamma"]
        self.is_told = asyncio.Event()

    async def ExplainRun(self, request, context):
        if not self.answers:
            self.is_told.set()
            return rs.ExplainRunResponse(summary="queued: trainer-0 has run gamma")
        return rs.ExplainRunResponse(summary=f"queued: trainer-0 has run {self.answers.pop(0)}")

    async def WatchRun(self, request, context):
        await self.is_told.wait()
        async for answer in super().WatchRun(request, context):
            yield answer


def test_watch_of_a_failed_run_is_1(server, capsys):
    server.add("alpha")
    error = run_pb2.RunError(reason="ENV_LOAD_FAILED", message="load_environment raised", component="env-server")
    server.events = [state(1, "STARTING", "FAILED", "", error=error)]
    server.runs["runs/alpha"].state = run_pb2.RUN_STATE_FAILED
    code, _, err = run(capsys, "watch", "alpha")
    assert code == 1
    assert "Error: runs/alpha failed: load_environment raised\n  at: env-server [ENV_LOAD_FAILED]" in err
    server.events = [state(1, "RUNNING", "CANCELLED", "asked")]
    code, _, err = run(capsys, "watch", "alpha")
    assert code == 1 and "runs/alpha ended as CANCELLED" in err


def test_logs_without_a_component_are_the_events(server, capsys):
    server.add("alpha")
    code, out, _ = run(capsys, "logs", "alpha", "-f")
    assert code == 0 and len(out.splitlines()) == len(server.events)


def test_cancel_and_why(server, capsys):
    server.add("alpha")
    assert run(capsys, "cancel", "alpha")[:2] == (0, "runs/alpha is asked to end (now RUNNING)\n")
    code, out, _ = run(capsys, "why", "alpha")
    assert code == 0
    assert out.splitlines() == [
        "trainer <- orchestrator <- env-server",
        "  trainer-0 waits for batch 3 ← orchestrator (3.2s)",
    ]
    server.add("omega", run_pb2.RUN_STATE_SUCCEEDED)
    code, _, err = run(capsys, "cancel", "omega")
    assert code == 2 and "the run has ended" in err


def test_what_is_already_so_is_said(server, capsys):
    server.add("alpha")
    assert run(capsys, "resume", "alpha")[:2] == (0, "runs/alpha is not paused: it goes on (now RUNNING)\n")
    server.add("omega", run_pb2.RUN_STATE_CANCELLED)
    assert run(capsys, "cancel", "omega")[:2] == (0, "runs/omega is already CANCELLED\n")


def test_numbers_that_are_not_there_yet(server, capsys):
    server.runs.clear()
    waiting = server.add("alpha", run_pb2.RUN_STATE_QUEUED)
    waiting.progress.Clear()
    waiting.progress.max_steps = 3
    name, state, step, reward, policy, tokens, *_ = run(capsys, "list")[1].splitlines()[1].split()
    assert (name, state, step, reward, policy, tokens) == ("alpha", "QUEUED", "0/3", "–", "–", "–")
    out = run(capsys, "show", "alpha")[1]
    assert "policy       –" in out and "rollouts     –" in out


def test_pause_and_resume(server, capsys):
    server.add("alpha")
    asked = run(capsys, "pause", "alpha", "--reason", "the GPUs are needed")
    assert asked[:2] == (0, "runs/alpha is asked to pause (now PAUSED)\n")
    assert run(capsys, "pause", "alpha")[:2] == (0, "runs/alpha is already paused\n")
    assert server.reasons == ["the GPUs are needed", ""]
    assert run(capsys, "resume", "alpha")[:2] == (0, "runs/alpha is asked to go on (now QUEUED)\n")
    server.add("omega", run_pb2.RUN_STATE_SUCCEEDED)
    code, _, err = run(capsys, "pause", "omega")
    assert code == 2 and "the run has ended" in err


RL = """
max_steps = 3
[model]
name = "gpt2"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[orchestrator.env]]
id = "reverse-text"
"""


def test_submit_with_and_without_at_sign(server, capsys, tmp_path):
    Path("rl.toml").write_text(RL)
    code, out, _ = run(capsys, "submit", "@", "rl.toml", "--name", "mine", "--trainer.optim.lr", "0")
    assert code == 0
    assert out == "submitted runs/mine (uid uid-mine)    watch: millrace run watch mine\n"
    request = server.requests[0]
    assert (
        request.run_id == "mine"
        and request.request_id
        and json.loads(request.config_json)["trainer"]["optim"]["lr"] == 0
    )
    assert run(capsys, "submit", "rl.toml", "--name", "other")[0] == 0
    assert server.requests[1].request_id != request.request_id
    code, out, _ = run(capsys, "submit", "rl.toml", "--dry-run")
    assert code == 0 and json.loads(out)["max_steps"] == 3 and len(server.requests) == 2


def test_submit_and_follow_writes_a_summary(server, capsys):
    Path("rl.toml").write_text(RL)
    server.events = [event for event in server.events if event.WhichOneof("body") != "policy_published"]
    code, out, err = run(capsys, "submit", "@", "rl.toml", "--name", "mine", "--follow")
    assert code == 0, err
    assert out.splitlines()[-1] == "outputs/mine/summary.json"
    assert json.loads(Path("outputs/mine/summary.json").read_text())["reward_after"] == 0.75
    assert "step   3/3" in err


def test_process_logs_of_the_stack_that_listens_there(tmp_path):
    logs = tmp_path / "local" / "logs"
    logs.mkdir(parents=True)
    for name in ("trainer", "inference"):
        (logs / f"{name}.log").write_text("")
    write_stack(tmp_path / "local", "127.0.0.1:5", logs=str(logs))
    found = process_logs("127.0.0.1:5", "runs/x", root=tmp_path)
    assert [path.name for path in found] == ["inference.log", "trainer.log"]
    assert [p.name for p in process_logs("127.0.0.1:5", "runs/x", component="trainer", root=tmp_path)] == [
        "trainer.log"
    ]
    assert process_logs("127.0.0.1:6", "runs/x", root=tmp_path) == []


def test_why_shows_one_link_per_line_and_marks_what_is_overdue():
    from millrace.cli.view.output import explanation
    from millrace.v1 import event_pb2, run_service_pb2

    late = event_pb2.Wait(owner="orch-0", reason="3 of 8 groups", waits_on="env-server", age_seconds=70)
    late.deadline_seconds = 60
    answer = run_service_pb2.ExplainRunResponse(
        summary="trainer-0 waits for batch 12, 70.5 s ← orch-0 waits for 3 of 8 groups, 70.0 s ← env-server is silent",
        waits=[late],
    )
    assert explanation(answer).splitlines() == [
        "trainer-0 waits for batch 12, 70.5 s",
        "  ← orch-0 waits for 3 of 8 groups, 70.0 s",
        "  ← env-server is silent",
        "every wait:",
        "  orch-0 waits for 3 of 8 groups ← env-server (70.0s of 60s, overdue)",
    ]
    assert explanation(run_service_pb2.ExplainRunResponse()) == "nothing waits"
