"""A policy version that is fetched, decoded and proved, ready to be put into an engine.

It lies between the puller (`host_copy.py`), which reads objects, and an engine, which holds weights in a layout of its
own. A staged policy holds the whole version, and says which elements changed since the version that the engine holds,
so that an engine can choose between loading everything and writing only what is new.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace.policies.change import TensorChange
from millrace.policies.manifest import PolicyManifest
from millrace.policies.tensors import TensorBytes, TensorPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPolicy:
    """One version in host memory, proved against its manifest.

    `tensors` are views of the host copy: they are valid until the next version is staged. `changes` say, by tensor
    name, what differs from the version `base`, a (lineage, version); they are None if that is unknown or everything may
    differ, and a tensor without an entry is unchanged. `path` is a file that holds the same bytes, in the safetensors
    layout that `places` tells, for engines in another process; None if there is none. `fetched_bytes` were read from
    the object store; `full_bytes` is what a full copy has.
    """

    manifest: PolicyManifest
    tensors: Mapping[str, TensorBytes]
    changes: Mapping[str, tuple[TensorChange, ...]] | None = None
    base: tuple[int, int] | None = None
    path: Path | None = None
    places: Mapping[str, TensorPlace] | None = None
    fetched_bytes: int = 0
    full_bytes: int = 0


class Stager(Protocol):
    """Fetches and proves a policy in host memory; `HostCopy` is one. All methods block."""

    def stage(self, manifest_key: str, sha256: bytes | None = None) -> StagedPolicy:
        """The version, whole and proved; a failure leaves what was staged before, or nothing."""
        ...

    def forget(self) -> None:
        """Make the next stage begin at an anchor."""
        ...

    def drop(self) -> None:
        """`forget`, and gives the memory back; never raises."""
        ...
