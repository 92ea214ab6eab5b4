"""Who may still have groups played once another orchestrator has spoken for the run."""

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.env_server.service import EnvService
from millrace.errors import CapacityError, FencedError
from millrace.internal.v1 import env_service_pb2
from millrace.rollouts.request_wire import play_to_wire
from millrace.rollouts.requests import EnvSpec, PlayRequest
from millrace.rollouts.types import Purpose


async def test_an_orchestrator_that_is_overtaken_while_the_teacher_is_checked_begins_nothing() -> None:
    def require_room() -> None:
        raise CapacityError("the next thing that is looked at")

    async def catch_up(run_uid: str, log_instance: str, *, timeout_s: float) -> None:
        pass

    class Teachers:
        async def require_ready(self, request: PlayRequest) -> None:
            newer = env_service_pb2.ListPlayingRequest(run_uid=request.run_uid, epoch=request.epoch + 1)
            assert not (await service.ListPlaying(newer, context)).groups, "it is told that nothing is played"

    nothing: Any = None
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    sink: Any = SimpleNamespace(spool=SimpleNamespace(require_room=require_room), catch_up=catch_up)
    teachers: Any = Teachers()
    service = EnvService(sink=sink, tokenizers=nothing, worker_id="e", starter=nothing, teachers=teachers)
    request = PlayRequest(
        run_uid="r1",
        purpose=Purpose.TRAIN,
        ordinal=0,
        members=[0],
        group_size=1,
        env=EnvSpec(id="e"),
        base_url="http://engine/v1",
        rollout_timeout_seconds=60.0,
        epoch=1,
    )
    with pytest.raises(FencedError, match="epoch 1 is older than epoch 2"):
        await service.PlayGroup(play_to_wire(request), context)
