"""What the workers read back, put together and compared with a manifest."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from millrace.errors import InternalError
from millrace.policies.digest import add_digests, digest_hex
from millrace.policies.manifest import PolicyManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Readback:
    """Tensors that were read back whole, and whether these are all."""

    names: tuple[str, ...]
    is_whole: bool


def combine(found: Iterable[list[list[Any]]], manifest: PolicyManifest) -> Readback:
    """Sums the ranks' boxes by tensor; InternalError if one that is whole has not the manifest's digest."""
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


def _mismatch(problem: str) -> InternalError:
    return InternalError(problem, reason="POLICY_READBACK_MISMATCH", remedy="the policy is loaded anew")
