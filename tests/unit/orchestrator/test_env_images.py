"""A run whose image no env-server announces is refused at submission, every such environment at once."""

import pytest

from millrace.config import EvalRunConfig, RLConfig
from millrace.config.load import validate_document
from millrace.errors import InvalidSpecError
from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.orchestrator.worker_checks import require_env_images
from millrace.orchestrator.workers import WorkerRegistry


def config(*envs: dict[str, object], evaluated: list[dict[str, object]] | None = None) -> RLConfig:
    orchestrator: dict[str, object] = {"rollouts_per_example": 2, "env": list(envs)}
    if evaluated is not None:
        orchestrator["eval"] = {"env": evaluated}
    found = validate_document({"model": {"name": "m"}, "orchestrator": orchestrator})
    assert isinstance(found, RLConfig)
    return found


def env_servers(*images: str) -> WorkerRegistry:
    registry = WorkerRegistry()
    registry.register(ws.Worker(worker_id="trainer", kind=ws.WORKER_KIND_TRAINER, env_image="t:1"))
    for number, image in enumerate(images):
        registry.register(ws.Worker(worker_id=f"env-{number}", kind=ws.WORKER_KIND_ENV_SERVER, env_image=image))
    return registry


def test_one_env_server_with_the_image_is_enough_and_without_any_the_run_waits() -> None:
    wanted = config({"id": "a", "image": "a:1"}, {"id": "b"})
    require_env_images(wanted, env_servers("", "a:1"))
    require_env_images(wanted, env_servers())
    require_env_images(config({"id": "b"}), env_servers("a:1"))  # a pod without an image may join later


def test_every_image_that_is_missing_is_named_with_what_is_there_and_what_to_start() -> None:
    own = {"id": "c", "image": "c:3"}
    wanted = config({"id": "a", "image": "a:2"}, {"id": "b", "image": "t:1"}, evaluated=[own])
    with pytest.raises(InvalidSpecError) as raised:
        require_env_images(wanted, env_servers("", "", "a:1"))
    assert raised.value.reason == "ENV_IMAGE_MISSING"
    assert [(each.field, each.value) for each in raised.value.violations] == [
        ("orchestrator.env[0].image", "a:2"),
        ("orchestrator.env[1].image", "t:1"),
        ("orchestrator.eval.env[0].image", "c:3"),
    ]
    message = raised.value.violations[0].message
    assert "registered: 2 with none, 1 with a:1" in message and "MILLRACE_ENV_IMAGE=a:2" in message


def test_an_evaluation_run_is_held_to_the_same() -> None:
    wanted = EvalRunConfig.model_validate({"model": {"name": "m"}, "env": [{"id": "a", "image": "a:1"}]})
    with pytest.raises(InvalidSpecError) as raised:
        require_env_images(wanted, env_servers(""))
    assert raised.value.violations[0].field == "env[0].image"


def test_an_environment_that_training_and_evaluation_share_has_one_image() -> None:
    shared = {"id": "a", "name": "a", "image": "a:1"}
    config(shared, evaluated=[shared])
    with pytest.raises(InvalidSpecError, match=r"must be equal to `orchestrator\.env\[0\]\.image`"):
        config(shared, evaluated=[{**shared, "image": "a:2"}])
    with pytest.raises(InvalidSpecError, match=r"must be equal to `orchestrator\.env\[0\]\.python`"):
        config({"id": "a", "python": "/v/bin/python"}, evaluated=[{"id": "a", "name": "a"}])
