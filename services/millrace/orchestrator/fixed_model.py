"""Stand-ins for what an evaluation run does without: a policy that changes, and a trainer."""

import asyncio
from collections.abc import Callable, Sequence

from millrace.orchestrator.policy_driver import PolicyDriver, Replica
from millrace.orchestrator.trainer_watch import TrainerWatch


class FixedEndpoints(PolicyDriver):
    """Endpoints that serve one model for good. They are known by configuration: they neither register nor update."""

    def use(self, urls: Sequence[str], *, model: str, max_concurrent: int) -> None:
        """Take these from now on; the first rollout finds out whether they answer."""
        self._endpoints = [
            Replica(worker_id=url, http_url=url, model=model, version=0, max_num_seqs=max_concurrent) for url in urls
        ]

    def ready(self) -> list[Replica]:
        """All of them."""
        return list(self._endpoints)

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


class NoTrainer(TrainerWatch):
    """A run that trains nothing takes no trainer from others."""

    async def run(self, *, is_closing: Callable[[], bool] = lambda: False) -> None:
        """Ends by cancellation."""
        await asyncio.Event().wait()

    async def wait_finished(self, *, is_needed: bool, spare_s: float = 0.0) -> None:
        """Nobody has anything to finish."""
