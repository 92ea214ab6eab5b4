from types import SimpleNamespace
from typing import Any, cast

from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, PlayingGroup
from millrace.orchestrator.play.play import MAX_PUT_OFF, PlayState
from millrace.orchestrator.play.player import Player, RunIdentity
from millrace.orchestrator.play.routing import ReadyReplica, Router
from millrace_testing.orchestrator.builders import book_with, make_rollout

RUN = RunIdentity(uid="r1", epoch=1, generation=1)


class Policies:
    desired = None

    def ready(self) -> list[ReadyReplica]:
        return [ReadyReplica(worker_id="inf", http_url="http://inf/v1", model="policy", version=0)]

    def known(self) -> set[str]:
        return {"inf"}


def player_of(envs: object, stream: object) -> Player:
    policies = cast("Any", Policies())
    return Player(run=RUN, envs=cast("Any", envs), policies=policies, stream=cast("Any", stream), router=Router())


async def test_a_lost_group_whose_members_come_while_it_is_stopped_is_whole() -> None:
    book = book_with(0, scored_whole=True)
    group = book.plays[0]
    group.place("a", replica="gone", timeout_s=60.0)

    class Stream:
        async def catch_up(self) -> None:
            book.add(make_rollout(0, 0, group_size=2, env_server="a"))

    class Envs:
        def alive(self) -> list[str]:
            return ["a"]

        async def cancel(self, groups: list[PlayingGroup], *, timeout_s: float) -> None:
            book.add(make_rollout(0, 1, group_size=2, env_server="a"))

    await player_of(Envs(), Stream()).place_open(book.plays.values())
    assert book.whole == [group]
    assert [rollout.member for rollout in group.rollouts()] == [0, 1]
    assert group.attempt == 0


async def test_a_play_behind_its_deadline_goes_on_where_its_env_server_plays_it() -> None:
    """The env-server counts each rollout's own time, which may be less than what has passed."""
    book = book_with(0, 1)
    slow, forgotten = book.plays[0], book.plays[1]
    for group in (slow, forgotten):
        group.place("a", replica="inf", timeout_s=-1.0, version=0)
    stopped: list[int] = []

    class Envs:
        def __init__(self) -> None:
            self.envs = {"reverse-text": SimpleNamespace(spec=EnvSpec(name="reverse-text"))}

        def alive(self) -> list[str]:
            return ["a"]

        def servers_with(self, env: str) -> list[str]:
            return []

        async def playing(self, log_instance: str, *, workers: set[str], timeout_s: float) -> dict[str, list]:
            assert workers == {"a"}
            return {"a": [PlayingGroup(purpose=rollout_pb2.PURPOSE_TRAIN, eval_id="", ordinal=0, attempt=0)]}

        async def cancel(self, groups: list[PlayingGroup], *, timeout_s: float) -> None:
            stopped.extend(group.ordinal for group in groups)

    async def catch_up() -> None:
        return None

    player = player_of(Envs(), SimpleNamespace(newest="", catch_up=catch_up))
    await player.place_open(book.plays.values())
    assert (slow.state, slow.attempt, slow.num_put_off) == (PlayState.PLACED, 0, 1) and slow.deadline > 0
    assert stopped == [1] and forgotten.attempt == 1, "what nobody plays is lost"
    slow.num_put_off, slow.deadline = MAX_PUT_OFF, 0.0
    await player.place_open(book.plays.values())
    assert slow.attempt == 1, "not for ever"


async def test_members_that_come_while_one_env_server_is_asked_are_not_asked_for_at_the_next() -> None:
    book = book_with(0)
    group = book.plays[0]
    asked: list[tuple[str, list[int]]] = []

    class Envs:
        def __init__(self) -> None:
            self.envs = {"reverse-text": SimpleNamespace(spec=EnvSpec(name="reverse-text"))}

        def servers_with(self, env: str) -> list[str]:
            return ["a", "b"]

        async def play(self, worker_id: str, request: PlayGroupRequest) -> bool:
            asked.append((worker_id, list(request.members)))
            if worker_id == "a" and len(asked) == 1:  # it plays, but its answer is lost
                book.add(make_rollout(0, 0, group_size=2))
                return False
            return True

    player = player_of(Envs(), SimpleNamespace(newest=""))
    while group.state is PlayState.UNPLACED:
        assert await player.place(group, book.plays.values())
    assert asked == [("a", [0, 1]), ("a", [1])], "member 0 is in the log already"
