"""Entry of the orchestrator service."""

import asyncio
import os
import sys

from millrace.errors import MillraceError
from millrace.processes import lifeline
from millrace.telemetry import logging as telemetry_logging
from millrace.telemetry.settings import Settings
from millrace.telemetry.startup import without_gc


def main() -> int:
    """Read the placement, then serve until a signal; returns the exit code."""
    lifeline.hold()
    try:
        settings = Settings.from_env(os.environ, required=["redis_url", "store_url", "listen"])
        telemetry_logging.setup("orchestrator")
        with without_gc():
            from millrace.orchestrator.serve import serve_orchestrator

        asyncio.run(serve_orchestrator(settings))
    except MillraceError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
