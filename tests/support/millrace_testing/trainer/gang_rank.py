"""One rank of a gang, started by torchrun in test_trainer_gang.py and others: trains one run to its end.

FAULTS_OF_RANKS names a directory in which each rank has a directory of faults of its own.
"""

import os
import sys

from millrace.storage import open_store
from millrace.telemetry import faults
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.job import JobContext, run_job
from millrace.trainer.log.background import BackgroundLoop, StopRequested
from millrace.trainer.publish.executor import Executor


def main(redis_url: str, store: str, prefix: str, uid: str, stop_at: str) -> None:
    """Train until the end, or until version `stop_at` ("" for the end); `store` is a URL, or a directory."""
    gang, url = Gang.join(), store if "://" in store else f"file://{store}"
    if own := os.environ.get("FAULTS_OF_RANKS"):
        faults.DIRECTORY = os.path.join(own, str(gang.rank))
    reached = [0]
    with BackgroundLoop() as background:
        context = JobContext(
            background=background,
            store=open_store(url),
            store_url=url,
            executor=Executor.chosen(),
            redis_url=redis_url,
            prefix=prefix,
            gang=gang,
            owner=f"rank-{gang.rank}",
            slot="test/gang",
            should_stop=lambda: bool(stop_at) and reached[0] >= int(stop_at),
            on_epoch=lambda epoch: None,
            on_progress=lambda version: reached.__setitem__(0, version),
        )
        try:
            run_job(context, uid)
        except StopRequested:
            if not stop_at:
                raise
    gang.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
