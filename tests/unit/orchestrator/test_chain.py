"""The chain of waits: from the trainer to what holds the run up, whatever the shape of the waits."""

from dataclasses import replace

from millrace.orchestrator.chain import Chain, Component, Severity, find_chain
from millrace.telemetry.waits import Wait


def wait(owner: str, reason: str, on: str = "", *, age: float = 5.0, deadline: float = 0.0) -> Wait:
    return Wait(owner=owner, reason=reason, waits_on=on, age_s=age, deadline_s=deadline)


def component(name: str, *waits: Wait, kind: str = "", **options) -> Component:
    return Component(name=name, kind=kind or name.rpartition("-")[0], waits=waits, **options)


def chain(*components: Component) -> Chain:
    return find_chain(components, starts=("trainer", "orchestrator"))


def trainer(**options) -> Component:
    return component("trainer-0", wait("trainer-0", "batch 12", "orchestrator"), **options)


ENGINE = "http://engine/v1"


def orchestrator(*waits: Wait) -> Component:
    return component("orch-0", *waits, kind="orchestrator")


def groups(on: str = "env-server", age: float = 5.0) -> Wait:
    return wait("orch-0", "3 of 8 groups for batch 12", on, age=age)


def test_the_chain_of_the_issue_in_words():
    found = chain(
        trainer(),
        orchestrator(groups()),
        component("env-server-a", wait("env-server-a", f"12 rollouts with the engine at {ENGINE}", ENGINE, age=4)),
        component(
            "inf-0", wait("inf-0", "policy 11 to be downloaded", "object store", age=34), kind="inference", url=ENGINE
        ),
    )
    assert str(found) == (
        "trainer-0 waits for batch 12, 5.0 s ← orch-0 waits for 3 of 8 groups for batch 12, 5.0 s"
        f" ← env-server-a waits for 12 rollouts with the engine at {ENGINE}, 4.0 s"
        " ← inf-0 waits for policy 11 to be downloaded, 34.0 s"
    )
    assert (end(found), found.severity) == ("object store", Severity.WAITS)


def end(found: Chain) -> str:
    """Who is at the end of the chain, as an event would name it."""
    last = found.links[-1].wait
    return last.waits_on or last.owner


def test_a_silent_worker_at_the_end_is_named_and_what_it_said_last_is_not_believed():
    inference = component(
        "inf-0", wait("inf-0", "anything", "redis"), kind="inference", url=ENGINE, silence_s=12.3, num_requests=4
    )
    found = chain(
        trainer(),
        orchestrator(groups(), wait("orch-0", "replica inf-0 to serve policy 11", "inf-0", age=90)),
        component("env-server-a", wait("env-server-a", "12 rollouts with the engine", ENGINE)),
        inference,
    )
    assert end(found) == "inf-0" and found.severity == Severity.SILENT
    assert str(found).endswith(" ← inference inf-0 has not answered for 12 s (frozen, or it or its machine is gone)")
    last = found.links[-1].wait
    assert (last.owner, last.waits_on, last.age_s) == ("orch-0", "inf-0", 12.3)


def test_of_two_env_servers_the_silent_one_is_named():
    found = chain(
        trainer(),
        orchestrator(groups()),
        component("env-server-a", wait("env-server-a", "12 rollouts", ENGINE)),
        component("env-server-b", silence_s=8),
    )
    assert end(found) == "env-server-b"


def test_a_silent_worker_that_nobody_waits_for_is_not_blamed():
    found = chain(
        trainer(),
        orchestrator(wait("orch-0", "policy 12 to be served", "inference")),
        component("env-server-b", silence_s=8),
        component("inf-0", kind="inference", activity="serves policy 11, 3 requests are open"),
    )
    assert end(found) == "inf-0"
    assert str(found).endswith(" ← inf-0 serves policy 11, 3 requests are open")


def test_a_silent_trainer_is_the_whole_chain():
    found = chain(trainer(silence_s=4), orchestrator(wait("orch-0", "policy 12 to be served", "trainer")))
    assert end(found) == "trainer-0" and len(found.links) == 1


def test_a_trainer_at_work_stands_at_the_end():
    found = chain(
        component("trainer-0", activity="works on step 11"),
        orchestrator(wait("orch-0", "policy 12 to be served", "trainer", age=40)),
    )
    assert str(found) == "orch-0 waits for policy 12 to be served, 40.0 s ← trainer-0 works on step 11"


def test_redis_outranks_ordinary_waits_wherever_it_stands():
    redis = "Redis at 127.0.0.1:1, which does not answer (reading batches)"
    found = chain(
        trainer(),
        orchestrator(groups(age=300), wait("orch-0", redis, "redis", age=8)),
        component("env-server-a", wait("env-server-a", "12 rollouts", ENGINE, age=200)),
        component("inf-0", kind="inference", url=ENGINE),
    )
    assert (end(found), found.severity) == ("redis", Severity.STORAGE)
    assert str(found).endswith(f"orch-0 waits for {redis}, 8.0 s")


def test_a_slow_store_is_the_end_and_a_young_operation_is_not():
    slow = wait("orch-0", "object store file:///s: PUT batches/00000012", "object store", age=12)
    found = chain(trainer(), orchestrator(groups(), slow), component("env-server-a", activity="plays 8 rollouts"))
    assert (end(found), found.severity) == ("object store", Severity.STORAGE)
    slow = replace(slow, age_s=1.5)
    found = chain(trainer(), orchestrator(groups(), slow), component("env-server-a", activity="plays 8 rollouts"))
    assert end(found) == "env-server-a"


def test_a_kind_without_a_worker_is_named():
    found = chain(trainer(), orchestrator(groups()))
    assert (end(found), found.severity) == ("env-server", Severity.MISSING)
    assert str(found).endswith(" ← no env-server worker is registered for this run")


def test_an_unresponsive_environment_worker_is_its_env_servers():
    stuck = wait("env-server-a", "env worker reverse-text#0 (pid 7), which does not answer: 3 rollouts", "env worker x")
    found = chain(
        trainer(),
        orchestrator(groups()),
        component("env-server-a", wait("env-server-a", "3 rollouts", ENGINE, age=60), stuck),
        component("inf-0", kind="inference", url=ENGINE, num_requests=0),
    )
    assert found.links[-1].wait == stuck and found.severity == Severity.SILENT


def test_an_engine_without_requests_is_not_what_rollouts_wait_for():
    found = chain(
        trainer(),
        orchestrator(groups()),
        component("env-server-a", wait("env-server-a", "3 rollouts", ENGINE)),
        component("inf-0", kind="inference", url=ENGINE, num_requests=0),
    )
    assert found.links[-1].wait.owner == "env-server-a"
    assert str(found).endswith(" ← inf-0 has no open request: the environment's own code works")


def test_overdue_is_marked_and_preferred():
    found = chain(
        trainer(),
        orchestrator(groups(), wait("orch-0", "evaluation of x", "env-server", age=70, deadline=60)),
        component("env-server-a", activity="plays 8 rollouts"),
    )
    assert "waits for evaluation of x, 70.0 s (overdue: 60 s are expected)" in str(found)
    assert found.severity == Severity.OVERDUE


def test_two_that_wait_for_each_other_end_the_chain():
    found = chain(trainer(), orchestrator(wait("orch-0", "policy 12 to be served", "trainer")))
    assert [link.wait.reason for link in found.links] == ["batch 12", "policy 12 to be served"]
    assert found.links[-1].wait.owner == "orch-0"


def test_nobody_waits():
    assert not chain(component("trainer-0"), orchestrator(), component("inf-0", kind="inference")).links
    assert str(find_chain([], starts=("trainer",))) == ""
