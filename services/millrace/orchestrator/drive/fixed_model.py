"""What an evaluation run has instead of policies that change, and of a trainer."""

import asyncio
from collections.abc import Callable, Sequence

from millrace.internal.v1 import policy_pb2
from millrace.orchestrator.play.routing import ReadyReplica


class FixedEndpoints:
    """Policies that never change: endpoints known by configuration, which neither register nor update."""

    desired = None
    newest_due = held_version = None

    def __init__(self, urls: Sequence[str], *, model: str, max_concurrent: int) -> None:
        """The first rollout finds out whether they answer."""
        self._endpoints = [
            ReadyReplica(worker_id=url, http_url=url, model=model, version=0, max_num_seqs=max_concurrent)
            for url in urls
        ]

    def publish(self, entry: policy_pb2.PolicyEntry) -> None:
        """Nobody publishes anything."""

    def ready(self) -> list[ReadyReplica]:
        """All of them."""
        return list(self._endpoints)

    def served_version(self) -> int | None:
        """The only one."""
        return 0 if self._endpoints else None

    def up_to(self, version: int) -> str:
        """There is nobody else."""
        return "inference"

    def hold(self, version: int) -> None:
        """They keep their version anyway."""

    def release(self) -> None:
        """There is nothing to go on to."""

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
        """End by cancellation."""
        await asyncio.Event().wait()

    async def wait_finished(self, *, is_needed: bool, spare_s: float) -> None:
        """Nobody has anything to finish."""
