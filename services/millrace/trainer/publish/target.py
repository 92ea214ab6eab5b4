"""Where a rank publishes a run's policies, and as who."""

from dataclasses import dataclass

from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore
from millrace.trainer.gang.distributed import Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTarget:
    """The run's place in the store, this rank's place in the gang, and the epoch that fences what it writes."""

    store: ObjectStore
    names: Names
    gang: Gang
    epoch: int | None
    """None at ranks other than 0, which commit nothing."""
