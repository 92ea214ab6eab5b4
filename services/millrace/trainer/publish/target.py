"""Where a rank publishes a run's policies, and as who."""

from dataclasses import dataclass

from millrace.config.sections.trainer import PolicyConfig
from millrace.policies.digest import decode_threads
from millrace.policies.publishing.share import LocalShareWriter, ShareWriter
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.publish.executor import Executor
from millrace.trainer.publish.share_process import ShareWriterProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTarget:
    """The run's place in the store, this rank's place in the gang, and the epoch that fences what it writes."""

    store: ObjectStore
    names: Names
    gang: Gang
    epoch: int | None
    """None at ranks other than 0, which commit nothing."""
    store_url: str = ""
    """The store's, for a process that publishes; empty: none may, because nobody else can open this store."""
    executor: Executor = Executor.AUTO
    """Who does the work."""

    def is_process(self, *, share_bytes: int) -> bool:
        """Whether a process of its own publishes a share of that size."""
        return self.executor.is_process(share_bytes=share_bytes, store_url=self.store_url)

    def share_writer(self, config: PolicyConfig, *, is_process: bool) -> ShareWriter:
        """What writes this rank's share of the versions, on the thread that asks or in a process of its own."""
        skip_deltas = tuple(config.skip_deltas) if config.delta else ()
        threads = max(1, decode_threads() // self.gang.world_size)
        if not is_process:
            return LocalShareWriter(self.store, skip_deltas=skip_deltas, threads=threads)
        rank = None if self.gang.is_alone else self.gang.rank
        return ShareWriterProcess(
            self.store_url, skip_deltas=skip_deltas, threads=threads, run=self.names.uid, rank=rank
        )
