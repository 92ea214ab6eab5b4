"""Who may still have groups played once another orchestrator has spoken for the run."""

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.env_server.service import EnvService
from millrace.errors import CapacityError, FencedError
from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest


async def test_an_orchestrator_that_is_overtaken_while_the_teacher_is_checked_begins_nothing() -> None:
    def require_room() -> None:
        raise CapacityError("the next thing that is looked at")

    async def catch_up(run_uid: str, log_instance: str, *, timeout_s: float) -> None:
        pass

    class Teachers:
        async def require_ready(self, request: PlayGroupRequest) -> None:
            newer = env_service_pb2.ListPlayingRequest(run_uid=request.run_uid, epoch=request.epoch + 1)
            assert not (await service.ListPlaying(newer, context)).groups, "it is told that nothing is played"

    nothing: Any = None
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    sink: Any = SimpleNamespace(spool=SimpleNamespace(require_room=require_room), catch_up=catch_up)
    teachers: Any = Teachers()
    service = EnvService(sink=sink, tokenizers=nothing, worker_id="e", starter=nothing, teachers=teachers)
    request = PlayGroupRequest(
        run_uid="r1",
        purpose=rollout_pb2.PURPOSE_TRAIN,
        ordinal=0,
        members=[0],
        group_size=1,
        env=EnvSpec(id="e"),
        base_url="http://engine/v1",
        rollout_timeout_seconds=60.0,
        epoch=1,
    )
    with pytest.raises(FencedError, match="epoch 1 is older than epoch 2"):
        await service.PlayGroup(request, context)
