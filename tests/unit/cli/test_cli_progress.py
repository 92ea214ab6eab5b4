"""What is known of a run from its events, and how it is shown: plain lines and the live picture."""

import datetime
import io

import pytest
from rich.console import Console

from millrace.cli.view.lines import log_line, progress_line
from millrace.cli.view.live import render
from millrace.cli.view.output import explanation, run_details
from millrace.cli.view.progress import Progress
from millrace.cli.view.text import count, duration, size, sparkline, table
from millrace.cli.view.view import PlainView, is_fancy, make_view
from millrace.v1 import event_pb2, run_pb2, run_service_pb2
from millrace_testing.runlog.recorded_run import at, evaluation, progress_of, recorded, state, step


def plain_lines(events: list[event_pb2.Event]) -> list[str]:
    progress = Progress(name="runs/x", max_steps=3, staleness_bound=8)
    out = io.StringIO()
    with PlainView(out, progress) as view:
        for event in events:
            progress.apply(event)
            view.show(event)
    return out.getvalue().splitlines()


def picture(progress: Progress, *, width: int = 110) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    console.print(render(progress, elapsed_s=61))
    return console.export_text()


def test_what_a_model_wrote_steers_no_terminal():
    """Errors of environments quote it: in events, in `run show`, and in why a run waits."""
    said = "ToolError: \x1b]0;owned\x07\x1b[2J\nstep 3/3"
    failed = event_pb2.Event(rollouts_failed=event_pb2.RolloutsFailed(message=said))
    lost = event_pb2.Event(warning=event_pb2.Warning(reason="R", message=said))
    progress = run_pb2.RunProgress(environments=[run_pb2.EnvRollouts(env="e", num_failed=1, first_error=said)])
    run = run_pb2.Run(name="runs/x", progress=progress, error=run_pb2.RunError(reason="R", message=said))
    answer = run_service_pb2.ExplainRunResponse(waits=[event_pb2.Wait(owner="o", reason=said)])
    lines = plain_lines([failed, lost])
    assert len(lines) == 2 and "ToolError: ␛]0;owned␇␛[2J ⏎ step 3/3" in lines[0]
    shown = "".join([*lines, run_details(run, [], now=datetime.datetime.now(datetime.UTC)), explanation(answer)])
    assert "\x1b" not in shown and "\x07" not in shown and shown.count("owned") == 5


def test_state_of_a_finished_run():
    progress = progress_of(recorded())
    assert progress.state == run_pb2.RUN_STATE_SUCCEEDED
    assert progress.step == 3 and progress.committed == 1
    assert (progress.reward_before, progress.reward_after) == (0.45, 0.75)
    assert progress.wait_ratio == pytest.approx(2.0 / 4.0)
    assert progress.policy is not None and progress.policy.version == 3
    assert progress.inference_version == 3
    assert progress.dropped == {"zero_advantage": 2}
    assert progress.entered[run_pb2.RUN_STATE_RUNNING] - progress.entered[run_pb2.RUN_STATE_STARTING] == 2.0


def test_rewards_are_means_over_environments_and_absent_without_two_versions():
    events = [evaluation(0, 1, 0.4, "a"), evaluation(0, 1, 0.6, "b")]
    progress = progress_of(events)
    assert progress.reward_before == 0.5 and progress.reward_after is None
    progress = progress_of([*events, evaluation(5, 9, 0.9, "a"), evaluation(5, 9, 0.7, "b")])
    assert progress.reward_after == pytest.approx(0.8)
    spanned = progress_of([*events, evaluation(5, 9, 0.9, "a"), evaluation(6, 9, 0.7, "b", step=5, newest=7)])
    assert spanned.reward_after == pytest.approx(0.8), "both are of the same step"
    assert progress_of([]).reward_before is None


def test_steps_that_a_resumed_trainer_repeats_replace_the_old_ones():
    events = [step(n, n, reward=0.1) for n in range(4)] + [step(2, 9, reward=0.5), step(3, 10, reward=0.6)]
    progress = progress_of(events)
    assert [(point.number, point.reward) for point in progress.steps] == [(1, 0.1), (2, 0.1), (3, 0.5), (4, 0.6)]


def test_an_evaluation_of_one_model_has_no_versions():
    done = evaluation(0, 0, reward=0.45)
    progress = Progress(name="runs/x", has_versions=False)
    progress.apply(done)
    assert progress_line(done, progress) == "eval reverse-text  reward 0.450  (64 rollouts, 2.0s)"
    assert "0.450" in picture(progress) and "(v0)" not in picture(progress)
    assert not Progress.of(run_pb2.Run(name="runs/x", kind=run_pb2.RUN_KIND_EVAL)).has_versions
    assert Progress.of(run_pb2.Run(name="runs/x", kind=run_pb2.RUN_KIND_RL)).has_versions


def test_plain_lines_of_a_run():
    lines = plain_lines(recorded())
    assert lines == [
        "QUEUED -> STARTING  claimed by an orchestrator",
        "STARTING -> RUNNING  workers, environments and policy are ready",
        "eval reverse-text  policy v0  reward 0.450  (64 rollouts, 2.0s)",
        "step   1/3  reward 0.400  staleness 0.8/8  7.1k tok/s  2.00s (wait 1.50s, 75%)  kl 1.2e-05",
        "warning: 3 groups dropped; raise max_off_policy_steps [STALE_GROUPS]",
        "step   2/3  reward 0.550  staleness 0.8/8  14.2k tok/s  1.00s (wait 0.25s, 25%)  kl 1.2e-05  eta 1s",
        "trainer-0 waits for batch 3 ← orchestrator (12.0s of 60s)",
        "step   3/3  reward 0.700  staleness 0.8/8  14.2k tok/s  1.00s (wait 0.25s, 25%)  kl 1.2e-05  eta 0s",
        "eval reverse-text  policy v3  reward 0.750  (64 rollouts, 2.0s)",
        "RUNNING -> STOPPING  every step is done",
        "score of policy v3  mismatch kl 2.0e-09  largest log-prob difference 4.0e-06  (600 tokens)",
        "checkpoint of step 3 saved  1.4 MB  ",
        "STOPPING -> SUCCEEDED  done",
    ]


def test_line_of_a_run_without_end_or_kl():
    progress = Progress(name="runs/x")
    event = step(11, 1, reward=0.5)
    event.step_completed.metrics.clear()
    progress.apply(event)
    line = "step  12  reward 0.500  staleness 0.8  14.2k tok/s  1.00s (wait 0.25s, 25%)"
    assert progress_line(event, progress) == line


def test_the_first_step_says_nothing_of_the_time_that_is_left():
    progress = progress_of([step(0, 0, reward=0.1, step_s=90.0)])
    progress.max_steps = 11
    assert progress.eta_s is None
    progress.apply(step(1, 1, reward=0.1, step_s=2.0))
    assert progress.eta_s == 2.0 * 9


def test_failure_is_told():
    error = run_pb2.RunError(reason="ENV_LOAD_FAILED", message="load_environment raised", component="env-server")
    lines = plain_lines([state(1, "STARTING", "FAILED", "", error=error)])
    assert lines == ["STARTING -> FAILED [ENV_LOAD_FAILED]"]


def test_a_training_that_goes_on_says_behind_which_step_and_why():
    body = event_pb2.TrainingResumed(step=4, start="checkpoint 4", published=6, epoch=2, reason="a gave it back: b")
    goes_on = at(5, "trainer-2", training_resumed=body)
    said = "training goes on after step 4 (checkpoint 4), steps 5 to 6 are trained again: a gave it back: b"
    assert plain_lines([goes_on]) == [said]
    first = event_pb2.TrainingResumed(start="the start of the run", published=1, reason="a gave it back: b")
    assert plain_lines([at(5, training_resumed=first)]) == [
        "training goes on from the start of the run, step 1 is trained again (`ckpt.interval` keeps checkpoints to go "
        "on from): a gave it back: b"
    ]
    assert progress_of([goes_on, step(5, 6, reward=0.5)]).resumed == body, "not as far as it was"
    assert progress_of([goes_on, step(6, 7, reward=0.5)]).resumed is None


def test_log_lines_carry_time_and_writer_for_every_kind_of_event():
    progress = progress_of([])
    for event in recorded():
        progress.apply(event)
        line = log_line(event, progress)
        assert line.startswith("22:13:2") or line.startswith("22:13:3")
        assert event.writer in line and "does not know" not in line
    assert "does not know" in log_line(at(1), progress)


def test_processes_have_the_short_names_of_the_pages():
    progress = progress_of([])
    served = event_pb2.PolicyServed(version=1, replica="inference-node-7-412-9f3ac1d2")
    event = at(1, policy_served=served)
    event.writer = "orchestrator-vm-32179-c1758318"
    line = log_line(event, progress)
    assert " orchestrator-1 " in line and "served by inference-1 " in line and "9f3ac1d2" not in line
    served.replica, event.writer = "inference-node-8-77-0000beef", "orchestrator-vm-5-c1758319"
    event.policy_served.CopyFrom(served)
    line = log_line(event, progress)
    assert " orchestrator-2 " in line and "served by inference-2 " in line
    assert progress.short("inference-node-7-412-9f3ac1d2, trainer-1, env-server-my-host.a-3-00c0ffee") == (
        "inference-1, trainer-1, env-server-1"
    )


def test_picture_before_the_first_event():
    text = picture(Progress(name="runs/x", max_steps=3))
    assert "runs/x  QUEUED  step 0/3  1m 01s" in text
    assert "policy – → inference –" in text


def test_picture_while_running():
    text = picture(progress_of(recorded()[:10]))
    assert "RUNNING  step 2/3" in text and "eta 1s" in text
    assert "reward" in text and "0.550" in text and "▁█" in text
    assert "trainer waited 25%" in text
    assert "\nreward " in text and "\n━" in text  # the bar has a line of its own
    assert "eval reverse-text  0.450 (v0)" in text
    assert "batches 1 committed, 2 tasks dropped → 0 queued → trainer step 2, waited 25% → policy v0" in text
    assert "trainer-0 waits for batch 3 ← orchestrator (12.0s of 60s)" in text


def test_picture_at_the_end_and_in_a_narrow_terminal():
    text = picture(progress_of(recorded()))
    assert "SUCCEEDED  step 3/3" in text and "0.450 (v0) → 0.750 (v3)" in text
    assert "waits for" not in text
    assert all(len(line) <= 40 for line in picture(progress_of(recorded()), width=40).splitlines())


def test_no_picture_without_a_terminal():
    assert isinstance(make_view(Progress(name="runs/x"), plain=False, stream=io.StringIO()), PlainView)


def test_what_counts_as_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert is_fancy(Terminal(), plain=False, environ={})
    assert not is_fancy(Terminal(), plain=True, environ={})
    assert not is_fancy(Terminal(), plain=False, environ={"TERM": "dumb"})


def test_live_view_draws_the_run(monkeypatch):
    from millrace.cli.view.live import LiveView

    monkeypatch.setenv("NO_COLOR", "1")
    progress = Progress(name="runs/x", max_steps=3, staleness_bound=8)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with LiveView(console, progress) as view:
        for event in recorded():
            progress.apply(event)
            view.show(event)
            view.refresh()
        view.note("the end")
    text = out.getvalue()
    assert "SUCCEEDED" in text and "the end" in text and "0.8/8" in text
    assert "\x1b[3" not in text  # no colours


def test_text_of_numbers():
    assert [count(v) for v in (0, 950, 14_200, 3_100_000, 2e9)] == ["0", "950", "14.2k", "3.1M", "2.0G"]
    assert [duration(v) for v in (0.4, 43, 125, 4320)] == ["0s", "43s", "2m 05s", "1h 12m"]
    assert [size(v) for v in (512, 1_400_000)] == ["512 B", "1.4 MB"]
    assert sparkline([0, 1, 2, 3], width=3) == "▁▅█" and sparkline([]) == "" and sparkline([5, 5]) == "▁▁"
    assert table([("a", "bb"), ("ccc", "d")], header=("X", "Y")) == "X    Y\na    bb\nccc  d"
