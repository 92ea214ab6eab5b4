"""What placing a group costs does not grow with the groups, replicas and env-servers that there are: by counting."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest
from millrace.orchestrator.play.play import PlayState
from millrace.orchestrator.play.player import MAX_PLACING, Player, RunIdentity
from millrace.orchestrator.play.routing import ReadyReplica, Router
from millrace_testing.orchestrator.builders import book_with

SIZES = (4, 64, 256)


class Fleet:
    """Env-servers and replicas that count how often they are looked at."""

    desired = None

    def __init__(self, number: int, *, full: frozenset[str] = frozenset()) -> None:
        self.envs = {"reverse-text": SimpleNamespace(spec=EnvSpec(name="reverse-text"))}
        self.number, self.full = number, full
        self.looks: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.replicas: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0

    def ready(self) -> list[ReadyReplica]:
        self.looks["ready"] += 1
        return [
            ReadyReplica(worker_id=f"r{each}", http_url=f"http://r{each}/v1", model="policy", version=0)
            for each in range(self.number)
        ]

    def known(self) -> set[str]:
        return {f"r{each}" for each in range(self.number)}

    def alive(self) -> list[str]:
        return [f"e{each}" for each in range(self.number)]

    def servers_with(self, env: str) -> list[str]:
        self.looks["servers"] += 1
        return self.alive()

    async def play(self, worker_id: str, request: PlayGroupRequest) -> bool:
        self.asked[worker_id] += 1
        self.replicas[request.base_url] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return worker_id not in self.full


def player_of(fleet: Fleet) -> Player:
    async def catch_up() -> None:
        return None

    stream = cast("Any", SimpleNamespace(newest="", catch_up=catch_up))
    run, router = RunIdentity(uid="r1", epoch=1, generation=1), Router()
    return Player(run=run, envs=cast("Any", fleet), policies=cast("Any", fleet), stream=stream, router=router)


@pytest.mark.parametrize("number", SIZES)
async def test_a_round_looks_at_the_fleet_once_and_asks_so_many_at_once_that_all_are_equally_busy(number: int) -> None:
    fleet, book = Fleet(number), book_with(*range(2 * number))
    await player_of(fleet).place_open(book.plays.values())
    assert all(play.state is PlayState.PLACED for play in book.plays.values())
    assert fleet.looks == {"ready": 1, "servers": 1}
    assert set(fleet.asked.values()) == set(fleet.replicas.values()) == {2}
    assert fleet.most_at_once == min(2 * number, MAX_PLACING)


async def test_a_full_env_server_is_not_asked_for_every_group_of_a_round() -> None:
    fleet, book = Fleet(4, full=frozenset({"e0"})), book_with(*range(200))
    await player_of(fleet).place_open(book.plays.values())
    assert all(play.state is PlayState.PLACED for play in book.plays.values())
    assert fleet.asked["e0"] <= MAX_PLACING < fleet.asked["e1"]


async def test_an_environment_that_nobody_takes_is_not_asked_for_every_group_of_a_round() -> None:
    fleet, book = Fleet(2, full=frozenset({"e0", "e1"})), book_with(*range(200))
    await player_of(fleet).place_open(book.plays.values())
    assert fleet.asked.total() <= 2 * MAX_PLACING
