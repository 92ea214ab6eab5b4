"""The env-server's process: `python -m millrace.env_server.main` or `millrace-env-server`."""

import asyncio
import os
from collections.abc import Mapping
from typing import NoReturn

from millrace.env_server.settings import EnvServerSettings
from millrace.errors import InvalidSpecError, Violation
from millrace.processes.installed import require_tried
from millrace.processes.lifeline import run_service
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings
from millrace.telemetry.startup import without_gc


def main() -> NoReturn:
    """Run the env-server's process until SIGTERM or SIGINT, then exit with 0, or with the code of the error that
    ended it.
    """
    run_service(_run, before=lambda: require_tried("env-server"))


def _run() -> None:
    """Read the settings, check that workers can be confined so, and run the env-server until it is asked to end."""
    settings, own = _read_settings(os.environ)
    confinement = own.confinement()
    setup("env-server", level=settings.log_level, json_lines=settings.log_json)
    # Heavy imports are here, after the settings are known to be good.
    with without_gc():
        from millrace.env_server.run import run

    asyncio.run(run(settings, own, confinement))


def _read_settings(environ: Mapping[str, str]) -> tuple[Settings, EnvServerSettings]:
    """Return the settings of every service and those of the env-server, read from `environ`.

    Raises one InvalidSpecError with everything in both that is wrong.
    """
    violations: list[Violation] = []
    settings, own = Settings(), EnvServerSettings()
    try:
        settings = Settings.from_env(environ, required=["redis_url", "store_url", "orchestrator", "listen"])
    except InvalidSpecError as error:
        violations += error.violations
    try:
        own = EnvServerSettings.from_env(environ)
    except InvalidSpecError as error:
        violations += error.violations
    if violations:
        raise InvalidSpecError(violations, reason="SETTINGS_INVALID", remedy="set these variables and start again")
    return settings, own


if __name__ == "__main__":
    main()
