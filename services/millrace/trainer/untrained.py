"""The trainer of `millrace orchestrator --bench`: takes each batch, learns nothing, publishes the policy as it was.

Orchestrator, environments and engines work as in a run whose trainer is never late; `millrace.trainer.main` is the one
that learns.
"""

import os
from typing import TYPE_CHECKING, NoReturn

from millrace.processes.lifeline import run_service
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings

if TYPE_CHECKING:
    from millrace.trainer.training import Training


def pass_on(run: "Training") -> None:
    """Publish the start model's weights as the next version for each batch, until the closing header.

    Nothing is trained.
    """
    from millrace.trainer.training import Position  # with torch, while the process already registers

    with run.publisher:
        start = run.position.version
        run.publisher.publish(start)
        for batch in run.batches.follow(start):
            if batch.is_closing:
                return
            run.position = Position(batch.step + 1, batch.chain_hash)
            run.publisher.publish(run.position.version, step=batch.step)
            run.on_progress(run.position.version)


def main() -> NoReturn:
    """Run a worker that publishes and never trains, until it is stopped."""
    run_service(_worker)


def _worker() -> int:
    """Work as a trainer that publishes and never trains, as the environment's settings say; return the exit code."""
    settings = Settings.from_env(os.environ, required=["redis_url", "store_url", "orchestrator"])
    setup("trainer", level=settings.log_level, json_lines=settings.log_json)
    from millrace.trainer.serve import run

    return run(settings, train=pass_on)


if __name__ == "__main__":
    main()
