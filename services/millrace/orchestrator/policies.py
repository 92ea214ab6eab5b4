"""What a run's driver needs of policies and of a trainer, and those that do nothing, for a run with a fixed model."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from millrace.internal.v1 import policy_pb2
from millrace.orchestrator.play.routing import Replica, Replicas


class Policies(Replicas, Protocol):
    """The policies of a run and the replicas that serve them."""

    def publish(self, entry: policy_pb2.PolicyEntry) -> None:
        """A version was published."""
        ...

    def served_version(self) -> int | None:
        """Newest version that a ready replica serves."""
        ...

    def up_to(self, version: int) -> str:
        """Kind of component that must act before a version is served."""
        ...

    async def run(self) -> None:
        """Keep replicas at the newest version; ends by cancellation."""
        ...


class Trainer(Protocol):
    """The trainer of a run."""

    async def run(self, *, is_closing: Callable[[], bool]) -> None:
        """Keep one assigned, and raise TrainerFailedError if it gives up; ends by cancellation."""
        ...

    async def wait_finished(self, *, is_needed: bool, spare_s: float) -> None:
        """Wait until it has read the closing header and written everything."""
        ...


class FixedEndpoints:
    """Policies that never change: endpoints known by configuration, which neither register nor update."""

    desired = None

    def __init__(self, urls: Sequence[str], *, model: str, max_concurrent: int) -> None:
        """The first rollout finds out whether they answer."""
        self._endpoints = [
            Replica(worker_id=url, http_url=url, model=model, version=0, max_num_seqs=max_concurrent) for url in urls
        ]

    def publish(self, entry: policy_pb2.PolicyEntry) -> None:
        """Nobody publishes anything."""

    def ready(self) -> list[Replica]:
        """All of them."""
        return list(self._endpoints)

    def served_version(self) -> int | None:
        """The only one."""
        return 0 if self._endpoints else None

    def up_to(self, version: int) -> str:
        """There is nobody else."""
        return "inference"

    def known(self) -> set[str]:
        """Their URLs."""
        return {endpoint.worker_id for endpoint in self._endpoints}

    def replica_at(self, http_url: str) -> str:
        """The URL itself, if it is one of them."""
        return http_url if http_url in self.known() else ""

    def suspect(self, worker_id: str) -> None:
        """There is nobody to ask: what an endpoint lost is tried again after a pause."""

    async def run(self) -> None:
        """Nothing is driven; ends by cancellation."""
        await asyncio.Event().wait()


class NoTrainer:
    """A run that trains nothing takes no trainer from others."""

    async def run(self, *, is_closing: Callable[[], bool]) -> None:
        """Ends by cancellation."""
        await asyncio.Event().wait()

    async def wait_finished(self, *, is_needed: bool, spare_s: float) -> None:
        """Nobody has anything to finish."""
