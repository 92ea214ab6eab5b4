"""Memory of a computation that is not done: tensors are fake, and every storage is counted while it lives."""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from millrace.trainer.estimate.report import KINDS

_aten = torch.ops.aten
_Storages = dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]]


class Ledger(TorchDispatchMode):
    """In this block floating-point tensors that are made of nothing are fake, and so is what is computed from them.

    Integers are real, because models look at positions and masks. A number that is read from a fake tensor is 1.
    Bytes are counted under `kind` at the time they are allocated, until their storage dies; `peak` are those of the
    moment when most was held, of all but the kinds `elsewhere`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "parameters"
        self.gathers = "parameters"
        self.elsewhere: frozenset[str] = frozenset()
        self._fake = _fake_mode()
        self._storages: _Storages = {}
        self._held = dict.fromkeys(KINDS, 0)
        self._peak = dict(self._held)
        self._highest = 0

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes that live now, by kind."""
        return dict(self._held)

    @property
    def peak(self) -> Mapping[str, int]:
        """Bytes by kind, when they were most."""
        return dict(self._peak)

    def forget_peak(self) -> None:
        """Let the peak be what is held now."""
        self._highest = 0
        self._look()

    def rename(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Count tensors as of another kind from now on."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = _local(tensor).untyped_storage()
            self._drop(storage._cdata)
            self._add(storage, kind)

    def all_fake(self) -> FakeTensorMode:
        """A block in which every new tensor is fake and none is counted before it is renamed."""
        return self._fake

    def unseen(self) -> contextlib.AbstractContextManager[Any]:
        """A block that the ledger has no part in."""
        return _disable_current_modes()

    @contextlib.contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Count what FSDP frees and allocates again in place, which is no operation on tensors."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            _, kind, _ = self._drop(storage._cdata) or (None, self.gathers, 0)
            self._add(storage, kind)
            return result

        torch.UntypedStorage.resize_ = counted  # pyright: ignore[reportAttributeAccessIssue] - for the block only
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation, or let its shapes be computed, and count what it allocated."""
        kwargs = kwargs or {}
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(isinstance(each, DTensor) for each in tensors):
            return func(*args, **kwargs)  # of the optimizer, in place; what DTensor computes for itself is no memory
        if func is _aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0
        if func is _aten._grouped_mm.default:
            return self._count(_grouped(*args), self.kind)
        if not tensors and _is_floating(func, args, kwargs):
            with self._fake:
                result = func(*args, **kwargs)
            return self._count(result, self.gathers)
        if func is _aten.new_empty.default and self._kind_of(args[0]) == self.gathers:
            return self._count(func(*args, **kwargs), self.gathers)
        return self._count(func(*args, **kwargs), self.kind)

    def _count(self, result: Any, kind: str) -> Any:
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self._storages:
                    self._add(storage, kind)
        return result

    def _kind_of(self, tensor: torch.Tensor) -> str:
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found[1] if found else ""

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._storages[key] = (weakref.ref(storage, functools.partial(self._died, key)), kind, size)
        self._held[kind] += size
        self._look()

    def _died(self, key: int, reference: object) -> None:
        if key in self._storages and self._storages[key][0] is reference:
            self._drop(key)

    def _drop(self, key: int) -> tuple[object, str, int] | None:
        found = self._storages.pop(key, None)
        if found is not None:
            self._held[found[1]] -= found[2]
        return found

    def _look(self) -> None:
        total = sum(size for kind, size in self._held.items() if kind not in self.elsewhere)
        if total > self._highest:
            self._highest, self._peak = total, dict(self._held)


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """That of all ledgers: DTensor keeps fake tensors of its own from one to the next, and modes do not mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _grouped(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """What a grouped matrix multiplication of fake tensors gives; torch's own knows the shape for bfloat16 only."""
    groups = {(2, 2): [0 if ends is None else ends.numel()], (3, 3): [left.shape[0]]}
    return left.new_empty([*groups.get((left.dim(), right.dim()), []), left.shape[-2], right.shape[-1]])


def _is_floating(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a factory makes numbers, or bytes that numbers are sent in, and not indices or masks."""
    if func.overloadpacket is _aten.arange and kwargs.get("dtype") is None:
        return any(isinstance(each, float) for each in args)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point or dtype == torch.uint8


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
