"""Entry of the orchestrator service."""

import asyncio
import os
from typing import NoReturn

from millrace.processes.lifeline import run_service
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings
from millrace.telemetry.startup import without_gc


def main() -> NoReturn:
    """Read the placement, then serve until a signal; exits with the code of the error that ended it."""
    run_service(_run)


def _run() -> None:
    """Read the placement from the environment and serve until a signal."""
    settings = Settings.from_env(os.environ, required=["redis_url", "store_url", "listen"])
    setup("orchestrator")
    with without_gc():
        from millrace.orchestrator.serve import serve_orchestrator

    asyncio.run(serve_orchestrator(settings))


if __name__ == "__main__":
    main()
