"""Ask what the env-servers announced, when a run is submitted, whether one of them runs each image that it names."""

from collections.abc import Iterator

from millrace.config import EvalRunConfig, RLConfig
from millrace.config.sections.environments import NamedEnv
from millrace.errors import InvalidSpecError, Violation
from millrace.orchestrator.play.env_servers import IMAGE_REMEDY, images_in_words
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry


def require_env_images(config: RLConfig | EvalRunConfig, registry: WorkerRegistry) -> None:
    """InvalidSpecError names every image of an environment that no registered env-server announces.

    Without any env-server the run waits for one: what waits names the image.
    """
    records = registry.alive(WorkerKind.ENV_SERVER)
    announced = {record.worker.env_image for record in records}
    wrong = [
        Violation(
            field=field,
            value=env.image,
            message=f"is announced by no env-server (registered: {images_in_words(records)}): "
            + IMAGE_REMEDY.format(image=env.image),
        )
        for field, env in _environments(config)
        if env.image and env.image not in announced
    ]
    if records and wrong:
        raise InvalidSpecError(wrong, reason="ENV_IMAGE_MISSING")


def _environments(config: RLConfig | EvalRunConfig) -> Iterator[tuple[str, NamedEnv]]:
    """Every environment of its own, and the key of its image; those that evaluation takes from training only once."""
    if isinstance(config, EvalRunConfig):
        yield from ((f"env[{index}].image", env) for index, env in enumerate(config.env))
        return
    settings = config.orchestrator
    yield from ((f"orchestrator.env[{index}].image", env) for index, env in enumerate(settings.env))
    trained = {env.name for env in settings.env}
    for index, env in enumerate(settings.eval.env if settings.eval else []):
        if env.name not in trained:
            yield f"orchestrator.eval.env[{index}].image", env
