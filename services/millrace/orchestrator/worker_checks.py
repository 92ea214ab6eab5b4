"""What a submitted config needs of the registered workers: environments, keys, images and code of the user's own."""

from collections.abc import Iterator

from millrace.config import EvalRunConfig, RLConfig
from millrace.config.sections.environments import NamedEnv
from millrace.custom_code import CustomCode
from millrace.errors import InvalidSpecError, UnavailableError, Violation
from millrace.orchestrator.drive.assembly import env_specs, require_tasks, trained_envs
from millrace.orchestrator.play.env_servers import IMAGE_REMEDY, EnvServers, KeyVariables, images_in_words
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry

# Ask the env-servers, when a run is submitted, whether its environments can be loaded and have their keys.


async def check_environments(config: RLConfig | EvalRunConfig, registry: WorkerRegistry) -> None:
    """Have env-servers load every environment of the config, which stays loaded for the run.

    Raises InvalidStateError if one cannot be loaded or has no training tasks, InvalidSpecError if a key is not set, and
    UnavailableError if no env-server is registered.
    """
    servers = EnvServers(run_uid="", epoch=0, registry=registry, trained=trained_envs(config))
    try:
        if not servers.alive():
            raise UnavailableError(
                "the environments cannot be checked: no env-server is registered",
                reason="NO_ENV_SERVER",
                remedy="start one, or submit without the check",
            )
        await servers.open_all(env_specs(config), keys=_keys(config))
        for env in config.orchestrator.env if isinstance(config, RLConfig) else ():
            require_tasks(env, servers.envs[env.name])
    finally:
        await servers.close()


def _keys(config: RLConfig | EvalRunConfig) -> KeyVariables:
    """Return the environment variables in which env-servers must have the keys that a config needs."""
    if isinstance(config, EvalRunConfig):
        return KeyVariables(endpoint=(config.client and config.client.api_key_var) or "")
    teacher = config.orchestrator.algo.teacher
    return KeyVariables(teacher=(teacher and teacher.api_key_var) or "")


# Ask what the env-servers announced, when a run is submitted, whether one of them runs each image that it names.


def require_env_images(config: RLConfig | EvalRunConfig, registry: WorkerRegistry) -> None:
    """Raise InvalidSpecError naming every image in the config that no registered env-server announces.

    Do nothing while no env-server is registered: the run waits for one, and its wait names the image.
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
    """Yield every environment with the config key of its image; one that is trained on and evaluated comes once."""
    if isinstance(config, EvalRunConfig):
        yield from ((f"env[{index}].image", env) for index, env in enumerate(config.env))
        return
    settings = config.orchestrator
    yield from ((f"orchestrator.env[{index}].image", env) for index, env in enumerate(settings.env))
    trained = {env.name for env in settings.env}
    for index, env in enumerate(settings.eval.env if settings.eval else []):
        if env.name not in trained:
            yield f"orchestrator.eval.env[{index}].image", env


# Ask what the trainers announced, when a run is submitted, whether one of them may load its loss.

FIELD = "trainer.loss.import_path"


def require_loadable_loss(config: RLConfig, registry: WorkerRegistry) -> None:
    """Raise InvalidSpecError if the config's loss is the user's own and no registered trainer may import its module.

    Do nothing while no trainer is registered: the run waits for one. Whether the function works, only a trainer can
    say.
    """
    import_path = config.trainer.loss.import_path
    codes = [CustomCode(tuple(each.worker.custom_modules)) for each in registry.alive(WorkerKind.TRAINER)]
    if import_path is None or any(code.allows(import_path.partition(":")[0]) for code in codes):
        return
    if codes:  # without a trainer the run waits for one, which looks itself
        codes[0].require(import_path, field=FIELD, service="the trainer")
