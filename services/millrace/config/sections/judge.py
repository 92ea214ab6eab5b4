"""`judge` of an environment: what its reward functions ask other endpoints."""

from millrace.config.section import ConfigSection, option
from millrace.config.sections.client import VARIABLE_PATTERN


class JudgeConfig(ConfigSection):
    """Endpoints that an environment calls while it scores a rollout, mostly judges."""

    max_concurrent: int = option(
        32,
        "Most calls at once per worker process of the environment; more wait.",
        ge=1,
        lt=2**31,
    )
    timeout_s: float = option(
        60.0,
        "Seconds for a call with its retries; then its rollout fails as `JudgeTimeout`.",
        gt=0,
        le=86400,
    )
    api_key_var: str | None = option(
        None,
        "Environment variable of the env-server with the judge's key; the run is refused if it is not set. The key "
        "itself is never stored.",
        pattern=VARIABLE_PATTERN,
    )
