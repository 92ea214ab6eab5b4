"""The failure table: a process is killed at a named point, the run finishes by itself, and its log is clean."""

import pytest
from chaos_rows import ROWS
from chaos_stack import ChaosStack


@pytest.mark.parametrize("row", ROWS)
def test_a_kill_loses_and_repeats_nothing(chaos: ChaosStack, row: str) -> None:
    victim, point, when = ROWS[row].victim, ROWS[row].point, ROWS[row].when
    fault = chaos.arm(point, when=when)
    before = chaos.pid(victim)
    run = chaos.submit(max_steps=6)
    record = fault.wait(run)
    assert record["pid"] == before, f"{victim} was to be killed"
    chaos.finish(run)
    assert chaos.pid(victim) != before
    print(f"{row}: {run.require_recovery(record['time'])}")
