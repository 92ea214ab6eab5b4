"""What the workers hold, as they read it or foresee it, put together and compared with a manifest."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from millrace.errors import InternalError, UnavailableError
from millrace.inference.vllm.polling import until
from millrace.policies.digest import add_digests, digest_hex
from millrace.policies.manifest import PolicyManifest
from millrace.policies.tensors import element_bytes

MISMATCH = "POLICY_READBACK_MISMATCH"
"""Reason of an error that says that the engine holds other bits than it should."""

_DIGESTED_BYTES = 64 << 20  # read back between two decode steps: some tenth of a second
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1
_FORESEE_DEADLINE_S = 1800.0  # the digests of a whole model by one thread of each worker

Call = Callable[..., Awaitable[list[Any]]]
"""One call of every worker, by the method's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readback:
    """Tensors that were read back whole, and whether these are all."""

    names: tuple[str, ...]
    is_whole: bool


def combine(found: Iterable[list[list[Any]]], manifest: PolicyManifest) -> Readback:
    """Sum the ranks' boxes by tensor; InternalError if one that is whole has not the manifest's digest."""
    boxes: dict[str, dict[str, tuple[int, str]]] = {}
    for rank in found:
        for name, key, count, digest in rank:
            first = boxes.setdefault(name, {}).setdefault(key, (count, digest))
            if first != (count, digest):
                raise _mismatch(f"two ranks hold different bits of {name}")
    names: list[str] = []
    for entry in manifest.tensors:
        parts = list(boxes.get(entry.name, {}).values())
        if not parts or sum(count for count, _ in parts) != prod(entry.shape):
            continue
        held = digest_hex(add_digests(int(digest, 16) for _, digest in parts))
        if held != entry.digest:
            raise _mismatch(f"the engine holds digest {held} for {entry.name}, not {entry.digest}")
        names.append(entry.name)
    return Readback(names=tuple(names), is_whole=len(names) == len(manifest.tensors))


async def read_back(call: Call, manifest: PolicyManifest) -> Readback:
    """What the workers hold in the checkpoint's bits, read whole, some of it between any two decode steps.

    Of an adapter nothing: its tensors have no place in the model, and the base was proved when it was loaded.
    """
    if manifest.adapter is not None:
        return Readback(names=(), is_whole=False)
    sizes = [prod(tensor.shape) * element_bytes(tensor.dtype) for tensor in manifest.tensors]
    found: list[Any] = []
    for first, last in chunks(sizes, _DIGESTED_BYTES):
        found += await call("millrace_digests", [tensor.name for tensor in manifest.tensors[first:last]])
    return combine(found, manifest)


async def foresee(call: Call, manifest: PolicyManifest) -> Readback | None:
    """What the workers will hold with the staged version; None if that has to be read back after it is written.

    InternalError if that is not the version: then what they hold now is not what was proved.
    """
    answers = await until(
        lambda: call("millrace_foreseen"),
        lambda answers: not any(answer["is_pending"] for answer in answers),
        what="vLLM's workers to digest the policy",
        deadline_s=_FORESEE_DEADLINE_S,
        first_s=_FIRST_POLL_S,
        last_s=_LAST_POLL_S,
        late=UnavailableError(
            f"vLLM's workers did not digest the policy within {_FORESEE_DEADLINE_S:.0f} s",
            reason="ENGINE_SILENT",
            remedy="restart it",
        ),
    )
    if any(answer["rows"] is None for answer in answers):
        return None
    return combine([answer["rows"] for answer in answers], manifest)


def chunks(sizes: list[int], limit: int) -> list[tuple[int, int]]:
    """Consecutive [first, last) of items, each of about `limit` and at least one item."""
    found: list[tuple[int, int]] = []
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            found.append((first, index))
            first, total = index, 0
        total += size
    return [*found, (first, len(sizes))] if sizes else []


def _mismatch(problem: str) -> InternalError:
    return InternalError(problem, reason=MISMATCH, remedy="the policy is loaded anew")
