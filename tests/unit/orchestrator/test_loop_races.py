import asyncio
from types import SimpleNamespace
from typing import Any, cast

from orchestrator_builders import make_rollout

from millrace.config.load import validate_document
from millrace.internal.v1 import env_service_pb2
from millrace.orchestrator.dispatcher import Dispatcher, RunIdentity
from millrace.orchestrator.groups import Group, GroupTable
from millrace.orchestrator.loop import RolloutLoop
from millrace.orchestrator.policy_driver import Replica
from millrace.orchestrator.routing import Router
from millrace.orchestrator.tasks import TaskRef

ORCHESTRATOR = {"env": [{"id": "reverse-text"}], "batch_size": 8, "rollouts_per_example": 2}


def open_group(table: GroupTable, **options) -> Group:
    group = Group(
        task=TaskRef(ordinal=0, env="reverse-text", task_index=0),
        group_size=2,
        planned_step=0,
        env_server="a",
        **options,
    )
    table.open[0] = group
    return group


async def test_a_lost_group_whose_members_come_while_it_is_stopped_is_whole() -> None:
    table = GroupTable()
    group = open_group(table, is_scored_whole=True)

    class Stream:
        async def catch_up(self) -> None:
            table.add(make_rollout(0, 0, group_size=2, env_server="a"))

    class Dispatch:
        def lost(self, table: GroupTable) -> list[Group]:
            return list(table.open.values())

        async def stop(self, groups: list[Group]) -> None:
            table.add(make_rollout(0, 1, group_size=2, env_server="a"))

    absent = cast("Any", None)
    loop = RolloutLoop(
        max_steps=1,
        rule=absent,
        make_group=absent,
        tasks=absent,
        table=table,
        stream=cast("Any", Stream()),
        dispatcher=cast("Any", Dispatch()),
        policies=absent,
        ledger=absent,
        events=absent,
        algorithm=absent,
        filter_zero_advantages=False,
        seq_len=8,
        changed=asyncio.Event(),
        is_stopping=lambda: False,
    )
    await loop.place_open()
    assert table.finished[0] is group
    assert [rollout.member for rollout in group.rollouts()] == [0, 1]
    assert group.attempt == 0


async def test_members_that_come_while_one_env_server_is_asked_are_not_asked_for_at_the_next() -> None:
    table = GroupTable()
    group = open_group(table)
    group.env_server = ""
    asked: list[tuple[str, list[int]]] = []

    class Envs:
        def __init__(self) -> None:
            self.envs = {"reverse-text": SimpleNamespace(spec=env_service_pb2.EnvSpec(name="reverse-text"))}

        def servers_with(self, env: str) -> list[str]:
            return ["a", "b"]

        async def play(self, worker_id: str, request: env_service_pb2.PlayGroupRequest) -> bool:
            asked.append((worker_id, list(request.members)))
            if worker_id == "a" and len(asked) == 1:  # it plays, but its answer is lost
                table.add(make_rollout(0, 0, group_size=2))
                return False
            return True

    class Policies:
        desired = None

        def ready(self) -> list[Replica]:
            return [Replica(worker_id="inf", http_url="http://inf/v1", model="policy", version=0)]

    config = validate_document({"model": {"name": "m"}, "orchestrator": ORCHESTRATOR})
    dispatcher = Dispatcher(
        run=RunIdentity(uid="r1", epoch=1, generation=1),
        config=config.orchestrator,
        envs=cast("Any", Envs()),
        policies=cast("Any", Policies()),
        stream=cast("Any", SimpleNamespace(newest="")),
        router=Router(),
    )
    while not group.env_server:
        assert await dispatcher.dispatch(group, table, min_version=0)
    assert asked == [("a", [0, 1]), ("a", [1])], "member 0 is in the log already"
