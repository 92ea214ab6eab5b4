"""Calls of all workers of a replica, in which every answer and every failure arrives.

vLLM's executor (0.32) stops reading at the first rank that raises: the answers of later ranks stay in their queues, and
count as their answers to the next call. Its client with several engine cores (data parallelism) calls all of them, and
returns the first one's answers. Therefore a worker never raises, but answers its error, with the number of the call;
and the engine cores are called one by one.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace.backoff import Backoff
from millrace.errors import InternalError, InvalidStateError, UnavailableError
from millrace.inference.vllm.handover import ask_restart
from millrace.policies.manifest import StagedPolicy
from millrace.policies.tensors import TensorChange, TensorPlace
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_FETCH_DEADLINE_S = 1800.0  # that of a whole model over a slow network
_POLLS = Backoff(0.02, 0.5)

T = TypeVar("T")


class AnsweringWorker:
    """The worker's side. Mixed into vLLM's worker class."""

    def millrace_call(self, number: int, method: str, args: Sequence[Any]) -> list[Any]:
        """Call a method of the extension in this worker; return [number, result, ""], or [number, None, error] if it
        raises.

        `number` is that of the call, by which its caller knows the answer.
        """
        try:
            return [number, getattr(self, method)(*args), ""]
        except Exception as error:  # the edge of the process, where an error must not become vLLM's
            logger.exception("a call of the policy's worker failed", extra={"method": method})
            return [number, None, f"{type(error).__name__}: {error}"]

    def millrace_ping(self) -> None:
        """Return at once, as a sign that this worker answers."""


def misfits(found: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """Return why a policy does not fit, sorted, from the results of `millrace_check` on all ranks.

    `found` has for each rank (problems, names of tensors without a place on that rank). A name that has no place on any
    rank is one more problem.
    """
    problems = {problem for problems, _ in found for problem in problems}
    strangers = set[str].intersection(*(set(names) for _, names in found))
    return sorted(problems | {f"{name} is not a weight that the model takes" for name in strangers})


def units_of(found: Sequence[Sequence[int]]) -> list[int]:
    """Return the size in bytes of each unit that `millrace_prepare` builds: the most over the ranks, whose sizes
    differ.

    `found` has for each rank the sizes of its units.
    """
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
    """Call `ask` again and again until `is_done` is true for its answer, and return that; raise `late` after
    `deadline_s`.

    `what` is shown as the wait's reason. A call of the workers has to be short, and their work need not be, so the
    pauses between calls (`rests`) grow.
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
    """All workers of a replica: those of each engine core in turn, by rank."""

    def __init__(self, client: Any) -> None:
        """Take vLLM's engine client, by which all workers are called."""
        self._client = client
        self._count = 0

    @property
    def num_cores(self) -> int:
        """Return the number of engine cores of the replica, its data parallel ranks, each with the whole model."""
        return self._client.vllm_config.parallel_config.data_parallel_size

    @property
    def cores(self) -> list[int | None]:
        """Return the engine cores of the replica, as requests name them; [None] for a single one."""
        return [None] if self.num_cores == 1 else list(range(self.num_cores))

    @property
    def is_spread(self) -> bool:
        """Return whether some workers of the replica are on other nodes, which cannot read files of this one."""
        return self._client.vllm_config.parallel_config.nnodes > 1

    def require_readable(self, directory: str | None) -> None:
        """Raise InvalidStateError if some workers of the replica cannot read a directory of this node; None always
        passes.
        """
        if directory is not None and self.is_spread:
            raise InvalidStateError(
                f"{directory} cannot be read on all nodes of this replica",
                reason="WEIGHTS_NOT_FOUND",
                remedy="publish the weights as a policy, which each node pulls by itself",
            )

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension in every worker, and return their results by rank, once all have answered.

        Raises InternalError that names the first rank that failed, and UnavailableError if an answer is of an earlier
        call.
        """
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
        """Write a staged policy into files in `directory` for the workers, and return the order with paths and offsets.

        When this returns every worker can read them, on other nodes as well.
        """
        order = await asyncio.to_thread(write_order, staged, directory)
        if self.is_spread:
            await self._fetch(order, staged)
        return order

    async def _fetch(self, order: dict[str, Any], staged: StagedPolicy) -> None:
        """Have the other nodes pull the policy, and wait until all have it; the old one serves meanwhile.

        Adds the policy and a number to `order`. Raises UnavailableError if a node is late.
        """
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
        """Call a method of vLLM's worker class in every worker of every engine core, and return the answers by rank."""
        if self.num_cores == 1:
            return await self._client.collective_rpc(method, args=args)
        core = self._client.engine_core
        found = await core.call_utility_all_async("collective_rpc", method, None, args, None)
        return [answer for answers in found for answer in answers]

    def _out_of_step(self, method: str) -> UnavailableError:
        """Make the error for a rank that answers an earlier call than `method`, and ask for a restart of vLLM.

        vLLM failed in a call of its own then, and no later answer can be trusted.
        """
        problem = f"a worker of vLLM answers {method} with the answer to an earlier call"
        is_asked = ask_restart(problem)
        logger.critical("vLLM is out of step", extra={"method": method, "is_restarted": is_asked})
        return UnavailableError(
            problem, reason="ENGINE_OUT_OF_STEP", remedy="wait for the restart" if is_asked else "restart the replica"
        )


# Orders of the API server to the worker processes about one version: where its bits are and which of them are new.
#
# A worker gets paths and offsets, never tensors: it maps the host copy's file, and the file of changes written here.

# Above this share of a tensor's elements a copy of the whole is cheaper than a scatter.
_DENSE_SHARE = 0.125


def write_order(staged: StagedPolicy, directory: Path) -> dict[str, Any]:
    """Return the order for a staged policy, as plain values: where its bits are and which are new.

    Its changes are written into a file in `directory`, in place of the last order's. Raises InternalError if the policy
    is not in a file.
    """
    if staged.path is None or staged.places is None:
        raise InternalError("the staged policy is not in a file", reason="POLICY_NOT_IN_FILE", remedy="report it")
    order: dict[str, Any] = {
        "path": str(staged.path),
        "places": [[p.name, p.dtype, list(p.shape), p.offset, p.length_bytes] for p in staged.places.values()],
        "changed": None,
    }
    if staged.changes is not None:
        path = directory / "changes.bin"
        path.unlink(missing_ok=True)  # a worker may still have the one of a refused version mapped, to its old length
        order |= {"changes_path": str(path), "changed": _write_changes(staged, staged.changes, path)}
    return order


def _write_changes(staged: StagedPolicy, changes: Mapping[str, tuple[TensorChange, ...]], path: Path) -> list[Any]:
    """Write the changes of each tensor into the file `path`, and return an entry for each tensor.

    The entry is [name, None] for a tensor to copy whole, else [name, [[count, offset of positions, offset of bits],
    …]], with a list for each part of the changes; offsets are in bytes.
    """
    entries: list[Any] = []
    offset = 0
    with path.open("wb") as file:
        for name, parts in changes.items():
            size = staged.tensors[name].bits().size
            # A position takes 8 bytes: beyond this share the whole tensor is the smaller order.
            if sum(part.num_elements for part in parts) > size * _DENSE_SHARE:
                entries.append([name, None])
                continue
            written: list[list[int]] = []
            for part in parts:
                # A change of a dense range has no positions, and the workers' file has them for every part.
                positions = part.positions
                if positions is None:
                    positions = np.arange(part.start, part.start + part.num_elements, dtype=np.int64)
                file.write(np.ascontiguousarray(positions, dtype="<i8").data)
                file.write(np.ascontiguousarray(part.bits).data)
                # Readers map the file as int64, so every array begins at a multiple of 8 bytes.
                padding = -part.bits.nbytes % 8
                file.write(b"\0" * padding)
                written.append([part.num_elements, offset, offset + positions.nbytes])
                offset += positions.nbytes + part.bits.nbytes + padding
            entries.append([name, written])
    return entries


class OrderFiles:
    """The worker's view of an order: tensors and changes as arrays over mapped files."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        """Map the files of an order that `write_order` returned."""
        self._data = _map(order["path"])
        self.places = {
            name: TensorPlace(name=name, dtype=dtype, shape=tuple(shape), offset=offset, length_bytes=length)
            for name, dtype, shape, offset, length in order["places"]
        }
        self._changed: dict[str, Any] | None = None
        self._changes: NDArray[np.uint8] | None = None
        if order["changed"] is not None:
            self._changed = dict(order["changed"])
            self._changes = _map(order["changes_path"])

    def names(self) -> Sequence[str]:
        """Return the names of the tensors that the order changes, or of all if that is not known."""
        return list(self.places if self._changed is None else self._changed)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor of the policy, uint8; a view of the mapped file."""
        place = self.places[name]
        return self._data[place.offset : place.offset + place.length_bytes]

    def counts(self, name: str) -> list[int] | None:
        """Return the number of changed elements in each part of a tensor's changes; None if it has to be copied
        whole.
        """
        if self._changed is None or (parts := self._changed[name]) is None:
            return None
        return [count for count, _, _ in parts]

    def sparse(self, name: str, width: int) -> list[tuple[NDArray[np.int64], NDArray[np.uint8]]] | None:
        """Return (positions [N], bytes of the bits [N * width]) for each part of a tensor's changes.

        None if it has to be copied whole. `width` is the bytes of an element.
        """
        if self._changed is None or self._changes is None or (parts := self._changed[name]) is None:
            return None
        return [
            (
                self._changes[positions : positions + 8 * count].view("<i8"),
                self._changes[bits : bits + width * count],
            )
            for count, positions, bits in parts
        ]


def _map(path: str) -> NDArray[np.uint8]:
    """Return a file's bytes as a private mapping, uint8."""
    if Path(path).stat().st_size == 0:
        return np.empty(0, np.uint8)
    # Copy on write: torch takes writable arrays only, and a write here must never reach the host copy.
    return np.memmap(path, dtype=np.uint8, mode="c")
