"""Which replica a play goes to."""

from collections import Counter
from dataclasses import replace

from millrace.orchestrator.play.play import Arrival, Play, load_of
from millrace.orchestrator.play.routing import ReadyReplica, Router
from millrace.rollouts.types import RolloutStatus
from millrace_testing.orchestrator.builders import make_play, make_rollout


def replica(name: str, *, version: int = 5, seqs: int = 64) -> ReadyReplica:
    return ReadyReplica(
        worker_id=name, http_url=f"http://{name}/v1", model="policy", version=version, max_num_seqs=seqs
    )


def router(**load: int) -> Router:
    made = Router()
    made.count(lambda: Counter(load))
    return made


def picked(made: Router, *replicas: ReadyReplica, min_version: int = 0, home: str = "") -> str:
    found = made.choices(replicas).pick(min_version=min_version, home=home)
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


def failed(status: RolloutStatus) -> Play:
    play = make_play()
    play.place("env-server-0", replica="a", timeout_s=60.0)
    play.add(make_rollout(0, 0, group_size=2))
    assert load_of([play]) == {"a": 1}
    assert play.add(make_rollout(0, 1, group_size=2, status=status)) is Arrival.RETRY
    return play


def test_what_is_played_again_knows_its_replica_and_forgets_one_that_lost_it() -> None:
    play = failed(RolloutStatus.ENV_ERROR)
    assert (play.home, play.replica) == ("a", "") and load_of([play]) == {}
    assert failed(RolloutStatus.ENGINE_LOST).home == ""
