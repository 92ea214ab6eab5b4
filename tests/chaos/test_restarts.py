"""Every service is restarted in the middle of one run; a run is paused, its workers are free, and it goes on."""

import re
import signal
import time

import pytest

from millrace.processes.supervisor import TERM_GRACE_S
from millrace.v1 import run_pb2
from millrace_testing.chaos.stack import SERVICES, ChaosStack
from millrace_testing.patience import patient

pytestmark = pytest.mark.long

STOPPED_WITHIN_S = 2 * TERM_GRACE_S + 5.0  # the services, Redis behind them, and a sweep


def test_a_rolling_restart_of_every_service_loses_nothing(chaos: ChaosStack) -> None:
    run = chaos.submit(max_steps=60)
    run.wait_step(2)
    for name in SERVICES:
        old = chaos.pid(name)
        at = chaos.kill(name, signal.SIGTERM)
        assert not run.is_over, f"the run was over before {name} was restarted"
        ended_s = chaos.wait_replaced(name, old) - at
        assert ended_s < patient(TERM_GRACE_S), f"{name} took {ended_s:.1f} s to end"
        chaos.wait_restarted(name, old)
        ended = [line for line in chaos.notes() if f" {name} ended: " in line or f" {name} died: " in line]
        assert "ended: exit code 0; started again" in ended[-1]
        before = len(run.steps())
        run.wait_event(lambda _, before=before: len(run.steps()) > before, what=f"step after the restart of {name}")
        print(f"{name}: ended after {ended_s:.1f} s, progress again after {run.standstill_s(at):.1f} s")
    chaos.finish(run)
    told = [text for text in run.reconnects if re.search(r"draining; watch again with after='\S+'", text)]
    assert told, f"the watch stream was not told where to resume: {run.reconnects}"
    sequences: dict[str, list[int]] = {}
    for event in run.events:
        sequences.setdefault(event.writer, []).append(event.writer_sequence)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in sequences.values()), "nothing missed or twice"


def test_a_paused_run_frees_its_workers_and_goes_on(chaos: ChaosStack) -> None:
    run = chaos.submit(max_steps=40)
    run.wait_step(3)
    run.pause()
    assert not run.is_over, "it was paused in the middle"
    committed = len(run.of("batch_committed"))
    chaos.finish(chaos.submit(max_steps=2))  # with the workers of the paused one
    assert len(run.of("batch_committed")) == committed and run.state == run_pb2.RUN_STATE_PAUSED
    assert len(run.steps()) <= committed, "what is committed may still be trained, nothing else"
    chaos.kill("orchestrator")  # that it is paused is in the log, not in a process
    chaos.wait_ready()
    run.resume()
    chaos.finish(run)
    assert run.steps() == list(range(40)), "no step was lost or repeated"


def test_ctrl_c_of_the_whole_stack_mid_run_and_a_new_start(chaos: ChaosStack) -> None:
    run = chaos.submit(max_steps=40)
    run.wait_step(5)
    began = time.monotonic()
    chaos.stop()
    assert time.monotonic() - began < patient(STOPPED_WITHIN_S)
    assert chaos.workplace.processes_of(chaos.directory) == []
    chaos.start()
    chaos.finish(run)
