"""Calls of all workers of a replica, so that every answer and every failure is heard.

vLLM's executor (0.32) stops listening at the first rank that raises: what the ranks behind it answered stays in their
queues, and counts as their answer to the next call. Its client with several engine cores (data parallelism) calls all
of them, and returns the first one's answers. Therefore a worker never raises, but answers what went wrong, with the
number of the call; and the engine cores are asked one by one.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from millrace.backoff import Backoff
from millrace.errors import InternalError, InvalidStateError, UnavailableError
from millrace.inference.vllm.handover import ask_restart
from millrace.inference.vllm.orders import write_order
from millrace.policies.staged import StagedPolicy
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_FETCH_DEADLINE_S = 1800.0  # that of a whole model over a slow network
_POLLS = Backoff(0.02, 0.5)

T = TypeVar("T")


class AnsweringWorker:
    """The worker's side. Mixed into vLLM's worker class."""

    def millrace_call(self, number: int, method: str, args: Sequence[Any]) -> list[Any]:
        """[number, result, ""] of a method of the extension, or [number, None, what went wrong]."""
        try:
            return [number, getattr(self, method)(*args), ""]
        except Exception as error:  # the edge of the process, where an error must not become vLLM's
            logger.exception("a call of the policy's worker failed", extra={"method": method})
            return [number, None, f"{type(error).__name__}: {error}"]

    def millrace_ping(self) -> None:
        """Answers that this worker works."""


def misfits(found: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """What is wrong with a policy, from what `millrace_check` says of each rank."""
    problems = {problem for problems, _ in found for problem in problems}
    strangers = set[str].intersection(*(set(names) for _, names in found))
    return sorted(problems | {f"{name} is not a weight that the model takes" for name in strangers})


def units_of(found: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of each unit that `millrace_prepare` builds, where they are most: stages of a pipeline differ."""
    return [max(sizes) for sizes in zip_longest(*found, fillvalue=0)]


async def poll(
    ask: Callable[[], Awaitable[T]],
    is_done: Callable[[T], bool],
    *,
    what: str,
    deadline_s: float,
    rests: Backoff,
    late: UnavailableError,
) -> T:
    """Ask until an answer is done, and return it; raise `late` after `deadline_s`. `what` is waited for, visibly.

    A call of the workers has to be short, what they do meanwhile need not be, so the rests between calls grow.
    """
    began, num_asked = time.monotonic(), 0
    with waits.waiting(what, waits_on="inference", deadline_s=deadline_s):
        while not is_done(answer := await ask()):
            if time.monotonic() - began > deadline_s:
                raise late
            num_asked += 1
            await asyncio.sleep(rests.after(num_asked))
    return answer


class Ranks:
    """All workers of a replica: those of every engine core, one core after the other, by rank."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._count = 0

    @property
    def num_cores(self) -> int:
        """Engine cores of the replica: its data parallel ranks, each with all of the model."""
        return self._client.vllm_config.parallel_config.data_parallel_size

    @property
    def cores(self) -> list[int | None]:
        """The engine cores as a request names them; [None] for the only one."""
        return [None] if self.num_cores == 1 else list(range(self.num_cores))

    @property
    def is_spread(self) -> bool:
        """Whether some workers are on other nodes, where files of this one cannot be read."""
        return self._client.vllm_config.parallel_config.nnodes > 1

    def require_readable(self, directory: str | None) -> None:
        """InvalidStateError if there are workers that cannot read a directory of this node."""
        if directory is not None and self.is_spread:
            raise InvalidStateError(
                f"{directory} cannot be read on all nodes of this replica",
                reason="WEIGHTS_NOT_FOUND",
                remedy="publish the weights as a policy, which each node pulls by itself",
            )

    async def call(self, method: str, *args: Any) -> list[Any]:
        """What each worker returns; InternalError names the first rank that failed. All have answered then."""
        self._count += 1
        number = self._count
        answers = await self._ask("millrace_call", (number, method, args))
        if any(answer[0] != number for answer in answers):
            raise self._out_of_step(method)
        for rank, (_, _, problem) in enumerate(answers):
            if problem:
                where = f"rank {rank} of {len(answers)}: " if len(answers) > 1 else ""
                raise InternalError(f"{where}{problem}", reason="WORKER_FAILED", remedy="see vLLM's log")
        return [answer[1] for answer in answers]

    async def order(self, staged: StagedPolicy, directory: Path) -> dict[str, Any]:
        """The order for a staged policy, whose bits every worker can read when this returns."""
        order = await asyncio.to_thread(write_order, staged, directory)
        if self.is_spread:
            await self._fetch(order, staged)
        return order

    async def _fetch(self, order: dict[str, Any], staged: StagedPolicy) -> None:
        """Have the other nodes pull the policy by themselves, while the old one serves."""
        manifest = staged.manifest
        order["number"] = number = secrets.token_hex(8)
        order["policy"] = {
            "manifest_key": manifest.key,
            "digest": manifest.digest,
            "base": None if staged.changes is None or staged.base is None else list(staged.base),
        }
        await self.call("millrace_fetch", order)
        await poll(
            lambda: self.call("millrace_fetched", number),
            all,
            what=f"the other nodes to fetch policy {manifest.version}",
            deadline_s=_FETCH_DEADLINE_S,
            rests=_POLLS,
            late=UnavailableError(
                f"the other nodes of this replica did not fetch the policy within {_FETCH_DEADLINE_S:.0f} s",
                reason="NODE_SILENT",
                remedy="see the output of `millrace inference` there",
            ),
        )

    async def _ask(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if self.num_cores == 1:
            return await self._client.collective_rpc(method, args=args)
        core = self._client.engine_core
        found = await core.call_utility_all_async("collective_rpc", method, None, args, None)
        return [answer for answers in found for answer in answers]

    def _out_of_step(self, method: str) -> UnavailableError:
        """A rank answered what was asked before: vLLM failed in a call of its own, and nothing can be believed now."""
        problem = f"a worker of vLLM answers {method} with the answer to an earlier call"
        is_asked = ask_restart(problem)
        logger.critical("vLLM is out of step", extra={"method": method, "is_restarted": is_asked})
        return UnavailableError(
            problem, reason="ENGINE_OUT_OF_STEP", remedy="wait for the restart" if is_asked else "restart the replica"
        )
