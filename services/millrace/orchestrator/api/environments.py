"""Ask the env-servers, when a run is submitted, whether its environments can be loaded and have their keys."""

from millrace.config import EvalRunConfig, RLConfig
from millrace.errors import UnavailableError
from millrace.orchestrator.drive.assembly import env_specs, require_tasks, trained_envs
from millrace.orchestrator.play.env_servers import EnvServers, KeyVariables
from millrace.orchestrator.workers import WorkerRegistry


async def check_environments(config: RLConfig | EvalRunConfig, registry: WorkerRegistry) -> None:
    """Load every environment on an env-server, where the run will find them loaded.

    InvalidStateError names the environment that cannot be loaded and its error, or that has no training tasks,
    InvalidSpecError the key that is not set, UnavailableError says that there is no env-server.
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
    if isinstance(config, EvalRunConfig):
        return KeyVariables(endpoint=(config.client and config.client.api_key_var) or "")
    teacher = config.orchestrator.algo.teacher
    return KeyVariables(teacher=(teacher and teacher.api_key_var) or "")
