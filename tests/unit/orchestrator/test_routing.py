"""Which replica a play goes to."""

from collections import Counter
from dataclasses import replace

from orchestrator_builders import make_rollout

from millrace.orchestrator.groups import Arrival, Group, GroupTable
from millrace.orchestrator.policy_driver import Replica
from millrace.orchestrator.routing import Router
from millrace.orchestrator.tasks import TaskRef
from millrace.rollouts.types import RolloutStatus


def replica(name: str, *, version: int = 5, seqs: int = 64) -> Replica:
    return Replica(worker_id=name, http_url=f"http://{name}/v1", model="policy", version=version, max_num_seqs=seqs)


def router(**load: int) -> Router:
    made = Router()
    made.count(lambda: Counter(load))
    return made


def picked(made: Router, *replicas: Replica, min_version: int = 0, home: str = "") -> str:
    found = made.pick(replicas, min_version=min_version, home=home)
    return found.worker_id if found is not None else ""


def test_load_counts_relative_to_what_a_replica_generates_at_once() -> None:
    assert picked(router(small=8, large=16), replica("small", seqs=16), replica("large", seqs=64)) == "large"
    assert picked(router(small=3, large=16), replica("small", seqs=16), replica("large", seqs=64)) == "small"


def test_all_who_send_work_count_together() -> None:
    made = router(a=8, b=10)
    made.count(lambda: {"a": 8})  # evaluations beside training
    assert picked(made, replica("a"), replica("b")) == "b"


def test_a_replica_that_is_behind_by_more_than_the_bound_gets_nothing() -> None:
    assert picked(router(old=0, new=60), replica("old", version=3), replica("new"), min_version=4) == "new"
    assert picked(router(), replica("old", version=3), min_version=4) == ""


def test_a_group_stays_on_its_replica_unless_that_is_full_or_gone() -> None:
    assert picked(router(a=60, b=0), replica("a"), replica("b"), home="a") == "a"
    assert picked(router(a=64, b=0), replica("a"), replica("b"), home="a") == "b"
    assert picked(router(a=64, b=70), replica("a"), replica("b"), home="a") == "a"
    assert picked(router(), replica("b"), home="a") == "b"
    assert picked(router(), replica("a", version=3), replica("b"), min_version=4, home="a") == "b"


def test_a_replica_that_is_applying_a_version_gets_nothing_while_another_one_generates() -> None:
    applying = replace(replica("a"), is_applying=True)
    assert picked(router(a=0, b=60), applying, replica("b"), home="a") == "b"
    assert picked(router(), applying) == "a"


def play(table: GroupTable, status: RolloutStatus) -> Group:
    group = Group(task=TaskRef(ordinal=0, env="e", task_index=0), group_size=2, planned_step=0)
    group.env_server, group.replica = "env-server-0", "a"
    table.open[0] = group
    table.add(make_rollout(0, 0, group_size=2))
    assert table.load() == {"a": 1}
    assert table.add(make_rollout(0, 1, group_size=2, status=status)) is Arrival.RETRY
    return group


def test_what_is_played_again_knows_its_replica_and_forgets_one_that_lost_it() -> None:
    table = GroupTable()
    group = play(table, RolloutStatus.ENV_ERROR)
    group.next_attempt()
    assert (group.home, group.replica) == ("a", "") and table.load() == {}
    group = play(GroupTable(), RolloutStatus.ENGINE_LOST)
    group.next_attempt(is_lost=True)
    assert group.home == ""
