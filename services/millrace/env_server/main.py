"""The env-server's process: `python -m millrace.env_server.main` or `millrace-env-server`."""

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import InvalidSpecError, MillraceError, Violation
from millrace.telemetry import lifeline
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings
from millrace.telemetry.startup import without_gc

DEFAULT_SPOOL_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvServerSettings:
    """Settings of the env-server alone."""

    num_workers: int = 1
    """`MILLRACE_ENV_WORKERS`: worker processes per environment, each about 250 MB and 7 CPU-seconds to start."""
    capacity: int = 512
    """`MILLRACE_ENV_CAPACITY`: rollouts that are played, or wait to be appended, at once."""
    spool_dir: Path | None = None
    """`MILLRACE_SPOOL_DIR`: where finished rollouts are kept until they are resolved; of this env-server alone. Without
    it they lie in a temporary directory, and what is not in the log yet dies with this process."""
    spool_bytes: int = DEFAULT_SPOOL_BYTES
    """`MILLRACE_SPOOL_BYTES`: bound of what is kept there; above it no groups are taken."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "EnvServerSettings":
        """Read the variables; InvalidSpecError lists everything that is malformed."""
        names = {
            "num_workers": "MILLRACE_ENV_WORKERS",
            "capacity": "MILLRACE_ENV_CAPACITY",
            "spool_bytes": "MILLRACE_SPOOL_BYTES",
        }
        values: dict[str, int] = {}
        violations: list[Violation] = []
        for field, name in names.items():
            text = environ.get(name, "")
            if not text:
                continue
            if text.isdecimal() and int(text) > 0:
                values[field] = int(text)
            else:
                message = "must be a whole number above 0"
                violations.append(Violation(field=name, value=text, message=message, source="environment"))
        spool_dir = environ.get("MILLRACE_SPOOL_DIR", "")
        if problem := _spool_dir_problem(spool_dir):
            wrong = Violation(field="MILLRACE_SPOOL_DIR", value=spool_dir, message=problem, source="environment")
            violations.append(wrong)
        if violations:
            raise InvalidSpecError(violations, reason="SETTINGS_INVALID")
        return cls(**values, spool_dir=Path(spool_dir) if spool_dir else None)


def _spool_dir_problem(text: str) -> str:
    """What is wrong with it, or ""; it need not exist yet."""
    if not text:
        return ""
    path = Path(text)
    if not path.is_absolute():
        return "must be an absolute path"
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return f"must be a directory, and {existing} is none"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"must be writable, and {existing} is not"
    return ""


def main() -> None:
    """Serve until SIGTERM or SIGINT; exits with the code of the error that ended it."""
    lifeline.hold()
    try:
        settings, own = _read_settings(os.environ)
        setup("env-server", level=settings.log_level, json_lines=settings.log_json)
        asyncio.run(_run(settings, own))
    except MillraceError as error:
        print(f"millrace-env-server: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _read_settings(environ: Mapping[str, str]) -> tuple[Settings, EnvServerSettings]:
    """Both parts of the settings; InvalidSpecError lists what is wrong in either."""
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


async def _run(settings: Settings, own: EnvServerSettings) -> None:
    # Heavy imports stand here, after the settings are known to be good.
    with without_gc():
        from millrace.env_server.run import run

    await run(settings, own)


if __name__ == "__main__":
    main()
