"""How a command ends whose run has failed: the error once, with its cause, its place and its own remedy."""

import io

import pytest

from millrace.cli.errors import CliError, report
from millrace.cli.session.follow import require_success
from millrace.cli.view.lines import event_line, progress_line
from millrace.cli.view.progress import Progress
from millrace.errors import HELD_UP, RefusedError
from millrace.v1 import event_pb2, run_pb2

ERROR = run_pb2.RunError(
    reason="ENV_LOAD_FAILED",
    message="environment 'x': KeyError: 'a'\nat x.py:3",
    component="env-server",
    remedy="mend x",
)


def failed(error: run_pb2.RunError = ERROR) -> tuple[Progress, event_pb2.Event]:
    progress = Progress(name="runs/mine")
    event = event_pb2.Event()
    event.state_changed.new_state = run_pb2.RUN_STATE_FAILED
    event.state_changed.error.CopyFrom(error)
    progress.apply(event)
    return progress, event


def said(progress: Progress, **how) -> list[str]:
    with pytest.raises(CliError) as caught:
        require_success(progress, **how)
    out = io.StringIO()
    assert report(caught.value, is_debug=False, stream=out) == (5 if progress.held_up else 1)
    return out.getvalue().splitlines()


def test_on_a_server_its_commands_go_on():
    assert said(failed()[0]) == [
        "Error: runs/mine failed: environment 'x': KeyError: 'a' at x.py:3",
        "  at: env-server [ENV_LOAD_FAILED], details: millrace run why mine",
        "  remedy: mend x; then `millrace run resume mine` goes on with the run",
    ]


def test_on_a_stack_of_its_own_only_the_same_command_does(tmp_path):
    where, remedy = said(failed()[0], logs=tmp_path)[1:]
    assert where == f"  at: env-server [ENV_LOAD_FAILED], process logs: {tmp_path}"
    assert remedy == "  remedy: mend x; then the same command with --name mine --resume goes on with the run"
    (tmp_path / "env-server.log").write_text("")
    assert said(failed()[0], logs=tmp_path)[1].endswith(f"its log: {tmp_path}/env-server.log")


def test_a_long_cause_is_told_by_its_beginning_and_its_end():
    error = run_pb2.RunError(reason="R", message=f"begins {'x' * 900} ends", component="trainer")
    cause, _, remedy = said(failed(error)[0])
    assert len(cause) < 640 and "begins" in cause and cause.endswith(" ends")
    assert remedy == "  remedy: `millrace run resume mine` goes on with the run"


def test_a_follower_leaves_the_error_to_the_end_and_the_log_has_all_of_it():
    progress, event = failed()
    assert progress_line(event, progress) == "UNSPECIFIED -> FAILED [ENV_LOAD_FAILED]"
    line = event_line(event, progress)
    assert "KeyError: 'a' ⏎ at x.py:3; mend x" in line


def test_a_run_that_was_cancelled_is_no_error_to_mend():
    progress = Progress(name="runs/mine")
    progress.state = run_pb2.RUN_STATE_CANCELLED
    assert said(progress) == ["Error: runs/mine ended as CANCELLED"]


def test_a_run_that_is_held_up_names_the_command_that_goes_on(tmp_path):
    progress = Progress(name="runs/mine", state=run_pb2.RUN_STATE_RUNNING)
    where = {"cause": "DISK_FULL", "component": "trainer"}
    progress.held_up = RefusedError("cannot write /x", reason=HELD_UP, remedy="free disk space", metadata=where)
    assert said(progress) == [
        "Error: runs/mine cannot go on: cannot write /x",
        "  at: trainer [DISK_FULL], details: millrace run why mine",
        "  remedy: free disk space; then the run goes on by itself (millrace run watch mine)",
    ]
    place, remedy = said(progress, logs=tmp_path)[1:]
    assert place == f"  at: trainer [DISK_FULL], its log: {tmp_path}/trainer.log"
    assert remedy.endswith("then the same command with --name mine --resume goes on with the run")
