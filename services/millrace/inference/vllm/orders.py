"""What the API server tells the worker processes about one version: where its bits are and which of them are new.

A worker gets paths and places, never tensors: it maps the host copy's file, and the file of changes written here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import InternalError
from millrace.policies.change import TensorChange
from millrace.policies.staged import StagedPolicy
from millrace.policies.tensors import TensorPlace

# Above this share of a tensor's elements a copy of the whole is cheaper than a scatter.
_DENSE_SHARE = 0.125


def write_order(staged: StagedPolicy, directory: Path) -> dict[str, Any]:
    """The order for a staged policy, as JSON; its changes go into a file in `directory`, until the next order."""
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
    """[name, None] for a tensor to copy whole, [name, [[count, offset of positions, offset of bits], …]] otherwise."""
    entries: list[Any] = []
    offset = 0
    with path.open("wb") as file:
        for name, parts in changes.items():
            size = staged.tensors[name].bits().size
            if sum(part.num_elements for part in parts) > size * _DENSE_SHARE:
                entries.append([name, None])
                continue
            written: list[list[int]] = []
            for part in parts:
                positions = part.positions
                if positions is None:
                    positions = np.arange(part.start, part.start + part.num_elements, dtype=np.int64)
                file.write(np.ascontiguousarray(positions, dtype="<i8").data)
                file.write(np.ascontiguousarray(part.bits).data)
                padding = -part.bits.nbytes % 8
                file.write(b"\0" * padding)
                written.append([part.num_elements, offset, offset + positions.nbytes])
                offset += positions.nbytes + part.bits.nbytes + padding
            entries.append([name, written])
    return entries


class OrderFiles:
    """The worker's side: the tensors and changes of an order, as arrays over mapped files."""

    def __init__(self, order: Mapping[str, Any]) -> None:
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
        """The tensors that are new, or all of them if that is not known."""
        return list(self.places if self._changed is None else self._changed)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor."""
        place = self.places[name]
        return self._data[place.offset : place.offset + place.length_bytes]

    def counts(self, name: str) -> list[int] | None:
        """How many elements each part of a tensor's changes has; None if it has to be copied whole."""
        if self._changed is None or (parts := self._changed[name]) is None:
            return None
        return [count for count, _, _ in parts]

    def sparse(self, name: str, width: int) -> list[tuple[NDArray[np.int64], NDArray[np.uint8]]] | None:
        """(positions [N], bytes of the bits [N * width]) of a tensor's changes; None if it has to be copied whole."""
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
    if Path(path).stat().st_size == 0:
        return np.empty(0, np.uint8)
    # Copy on write: torch takes writable arrays only, and a write here must never reach the host copy.
    return np.memmap(path, dtype=np.uint8, mode="c")
