"""`judge` of an environment: what its reward functions ask other endpoints."""

from millrace.config.section import ConfigSection, option
from millrace.config.sections.client import VARIABLE_PATTERN


class JudgeConfig(ConfigSection):
    """Endpoints that an environment asks while it scores a rollout: judges, mostly."""

    max_concurrent: int = option(
        32,
        "Most calls at once, in each worker process of the environment; more of them wait for their turn.",
        ge=1,
        lt=2**31,
    )
    timeout_s: float = option(
        60.0,
        "Seconds that a call may take, its repetitions included; then its rollout fails as `JudgeTimeout`.",
        gt=0,
        le=86400,
    )
    api_key_var: str | None = option(
        None,
        "Name of the environment variable of the env-server from which the environment takes the judge's key: the run "
        "is refused where it is not set. The key itself is never written anywhere.",
        pattern=VARIABLE_PATTERN,
    )
