"""A custom loss is refused at submission where every trainer that is there may not load it."""

import pytest

from millrace.config.load import validate_document
from millrace.config.sections.rl import RLConfig
from millrace.errors import InvalidSpecError
from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.orchestrator.worker_checks import require_loadable_loss
from millrace.orchestrator.workers import WorkerRegistry


def config(**loss: str) -> RLConfig:
    orchestrator = {"rollouts_per_example": 2, "env": [{"id": "e"}]}
    found = validate_document({"model": {"name": "m"}, "orchestrator": orchestrator, "trainer": {"loss": loss}})
    assert isinstance(found, RLConfig)
    return found


def trainers(*modules: list[str]) -> WorkerRegistry:
    registry = WorkerRegistry()
    for number, each in enumerate(modules):
        kind = ws.WORKER_KIND_TRAINER
        registry.register(ws.Worker(worker_id=f"trainer-{number}", kind=kind, custom_modules=each))
    registry.register(ws.Worker(worker_id="env", kind=ws.WORKER_KIND_ENV_SERVER, custom_modules=["*"]))
    return registry


@pytest.mark.parametrize("modules", [[], [["*"]], [["team"]], [["other"], ["team.rl"]]])
def test_one_that_may_is_enough_and_where_none_is_the_run_waits_for_one(modules: list[list[str]]) -> None:
    require_loadable_loss(config(type="custom", import_path="team.rl.losses:fn"), trainers(*modules))


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ([[]], "MILLRACE_CUSTOM_CODE is not set, which allows none"),
        ([["other", "teams"], []], "MILLRACE_CUSTOM_CODE allows other, teams"),
    ],
)
def test_one_that_none_may_load_is_refused(modules: list[list[str]], says: str) -> None:
    with pytest.raises(InvalidSpecError, match=says) as raised:
        require_loadable_loss(config(type="custom", import_path="team.rl:fn"), trainers(*modules))
    assert raised.value.reason == "CUSTOM_CODE_NOT_ALLOWED" and "team.rl" in raised.value.violations[0].message
    require_loadable_loss(config(type="ppo"), trainers(*modules))
