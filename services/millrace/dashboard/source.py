"""What the pages need of an orchestrator: runs as it knows them now, why one waits, and a way to ask for something."""

from typing import Any, Protocol


class RunSource(Protocol):
    """The runs of a deployment. Answers come from memory where they can: Redis or the store may be away."""

    def list_runs(self, *, config: str = "") -> list[dict[str, Any]]:
        """Every run, or those whose configs match these words, the newest first, without its config."""
        ...

    async def find_run(self, name: str) -> dict[str, Any]:
        """One run with its config as `[path, value, default, is_default]`; NotFoundError if there is none."""
        ...

    def uid_of(self, name: str) -> str:
        """The uid of a run that is known; NotFoundError if there is none."""
        ...

    async def checkpoints(self, name: str) -> list[dict[str, Any]]:
        """Its committed checkpoints, oldest first."""
        ...

    def explain(self, name: str) -> dict[str, Any]:
        """Why it does not move: a summary, the chain of waits as boxes, and the waits of its processes."""
        ...

    async def act(self, name: str, action: str, *, reason: str) -> None:
        """`pause`, `resume` or `cancel` it."""
        ...

    async def audit(self, name: str) -> dict[str, Any]:
        """The audit's report on it: reads all of its log."""
        ...

    def trouble(self) -> str:
        """What of Redis or the store does not answer at the moment, in words; empty if both do."""
        ...
