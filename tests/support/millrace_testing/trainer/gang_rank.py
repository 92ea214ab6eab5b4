"""One rank of a gang, started by torchrun in test_trainer_gang.py: trains one run to its end."""

import sys
from pathlib import Path

from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.job import JobContext, run_job
from millrace.trainer.log.background import BackgroundLoop
from millrace.trainer.log.stop import StopRequested


def main(redis_url: str, store: str, prefix: str, uid: str, stop_at: str) -> None:
    """Trains until the end, or until the version `stop_at` ("" for none)."""
    gang = Gang.join()
    reached = [0]
    with BackgroundLoop() as background:
        context = JobContext(
            background=background,
            store=LocalStore(Path(store)),
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
