"""What runs that have workers may take beside those that wait, over the real registry."""

from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.orchestrator.queue.limits import Terms
from millrace.orchestrator.queue.order import QueueGroup
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry

REPLICA = WorkerKind.INFERENCE


def registry(*, trainers: int, replicas: int) -> WorkerRegistry:
    made = WorkerRegistry()
    for number in range(trainers):
        made.register(ws.Worker(worker_id=f"t{number}", kind=ws.WORKER_KIND_TRAINER, num_ranks=2))
    for number in range(replicas):
        made.register(ws.Worker(worker_id=f"i{number}", kind=ws.WORKER_KIND_INFERENCE))
    return made


def test_a_run_without_terms_takes_what_it_always_took() -> None:
    made = registry(trainers=1, replicas=3)
    made.limits.groups = {"a": QueueGroup(quota=1)}
    made.claim(WorkerKind.TRAINER, "run", limit=1)
    assert made.claim(REPLICA, "run") == 3


def test_a_gang_is_given_at_once_and_grows_up_to_its_most() -> None:
    made = registry(trainers=1, replicas=4)
    made.give("run", ("t0", "i0"), Terms(group="default", most_replicas=3))
    assert [len(made.owned(kind, "run")) for kind in (WorkerKind.TRAINER, REPLICA)] == [1, 1]
    assert made.claim(REPLICA, "run") == 3
    made.release("run")
    assert made.claim(REPLICA, "run") == 4, "terms end with the drive"


def test_a_gang_that_was_interrupted_gets_its_replicas_again_though_its_share_is_smaller() -> None:
    made = registry(trainers=3, replicas=6)
    for uid, workers in (("r1", ("t0", "i0")), ("r2", ("t1", "i1"))):
        made.give(uid, workers, Terms(group="default"))
    made.give("gang", ("t2",), Terms(group="default", least_replicas=4))
    assert made.claim(REPLICA, "gang") == 4


def test_a_quota_bounds_what_the_runs_of_a_group_have_together() -> None:
    made = registry(trainers=2, replicas=6)
    made.limits.groups, made.limits.elsewhere = {"a": QueueGroup(quota=8)}, {"a": 1}
    for uid, trainer in (("r1", "t0"), ("r2", "t1")):
        made.give(uid, (trainer,), Terms(group="a"))
    # Two trainers of two ranks, one accelerator elsewhere, and the first replica of the other run leave two.
    assert made.claim(REPLICA, "r1") == 2
    assert made.claim(REPLICA, "r2") == 1, "the room for its first replica was not lost"
    assert made.claim(REPLICA, "r1") == 2


def test_what_is_kept_for_the_head_goes_to_no_run_that_has_enough() -> None:
    made = registry(trainers=2, replicas=2)
    made.give("has", ("t0", "i0"), Terms(group="default"))
    made.limits.head, made.limits.head_replicas = "head", 2
    assert made.claim(REPLICA, "has") == 1
    # A run that has none could not end without it, and the head might wait for its end.
    made.give("lacks", ("t1",), Terms(group="default"))
    assert made.claim(REPLICA, "lacks") == 1


def test_what_becomes_free_between_two_looks_is_kept_for_the_head_up_to_its_need() -> None:
    made = registry(trainers=2, replicas=4)
    made.give("has", ("t0", "i0"), Terms(group="default"))
    made.give("ends", ("t1", "i1", "i2", "i3"), Terms(group="default"))
    made.limits.head, made.limits.head_replicas = "head", 2
    made.release("ends")
    assert made.claim(REPLICA, "has") == 2, "the third is not needed"
    assert len(made.free_for(REPLICA, "head")) == 2
    assert made.claim(REPLICA, "head") == 2


def test_accelerators_are_ranks_gpus_or_one() -> None:
    made = registry(trainers=1, replicas=1)
    made.heartbeat(ws.HeartbeatRequest(worker_id="i0", gpus=[ws.GpuUse(index=0), ws.GpuUse(index=1)]))
    made.register(ws.Worker(worker_id="t9", kind=ws.WORKER_KIND_TRAINER))
    assert [made.by_id[each].accelerators for each in ("t0", "i0", "t9")] == [2, 2, 1]
