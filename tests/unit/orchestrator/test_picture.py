"""The chain of waits as boxes: one for each that waits, and one for what is waited for."""

import pytest

from millrace.orchestrator.chain import Component, boxes, find_chain
from millrace.telemetry.waits import Wait


def wait(owner, reason, on="", *, age=5.0, deadline=0.0):
    return Wait(owner=owner, reason=reason, waits_on=on, age_s=age, deadline_s=deadline)


def drawn(*others, on="inference", deadline=0.0):
    trainer = Component(name="trainer-0", kind="trainer", waits=[wait("trainer-0", "batch 12", on, deadline=deadline)])
    return boxes(find_chain([trainer, *others], starts=("trainer", "orchestrator")))


def engine(*waits, **more):
    return Component(name="inf-0", kind="inference", waits=waits, **more)


@pytest.mark.parametrize(
    ("others", "name", "state", "says"),
    [
        ([engine()], "inf-0", "works", "works"),
        ([engine(silence_s=12.3)], "inf-0", "silent", "has not answered for 12 s"),
        ([], "inference", "missing", "no inference worker is registered"),
        ([engine(wait("inf-0", "policy 3 to be downloaded", "object store"))], "object store", "end", "is waited for"),
        ([engine(wait("inf-0", "an answer", "redis"))], "redis", "storage", "does not answer in time"),
    ],
)
def test_the_last_box_is_what_the_run_waits_for(others, name, state, says):
    found = drawn(*others)
    assert (found[0]["name"], found[0]["does"]) == ("trainer-0", "waits for batch 12")
    assert (found[-1]["name"], found[-1]["state"]) == (name, state)
    assert says in found[-1]["does"]


def test_how_far_long_work_is_stands_in_its_box():
    said = "model m to be loaded: 3.1 of 8.0 GB (39 %)"
    assert drawn(engine(wait("inf-0", said)))[-1]["does"] == f"waits for {said}"


def test_a_wait_that_is_overdue_is_told_apart():
    assert drawn(engine(), deadline=2.0)[0]["state"] == "overdue"
    assert drawn(engine(), deadline=9.0)[0]["state"] == "waits"


def test_nobody_waits_and_nothing_is_drawn():
    assert boxes(find_chain([engine()], starts=("trainer", "orchestrator"))) == []
