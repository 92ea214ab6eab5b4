"""The files of a checkpoint in a local directory: one of each rank, raw elements tensor after tensor, and an index.

A state is a flat dict of tensors by name. Of a sharded tensor every rank writes the rows that it holds; any other
tensor is written by rank 0, except for random states, which every rank writes itself. Loading copies ranges of
elements: the number of ranks may differ from that of the writers, and a rank reads only files with elements that it
holds.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.tensor import DTensor

from millrace.errors import InvalidStateError, MillraceError, UnavailableError
from millrace.policies.tensors import DTYPE_TAGS
from millrace.storage.scratch import scratch_errors
from millrace.trainer.checkpoint.index import (
    INDEX_FILE,
    ShardIndex,
    ShardPiece,
    ShardTensor,
    decode_tensors,
    encode_index,
    merge_tensors,
)
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.mesh import held

RANDOM_STATE = "rng."
"""Begins the names of tensors of which each rank has its own."""


@dataclass(frozen=True, slots=True)
class _Range:
    """The elements of a tensor, from and to, that this rank holds or loads: whole rows."""

    start: int
    end: int


def save_shards(state: Mapping[str, torch.Tensor], directory: Path, *, gang: Gang) -> None:
    """Write this rank's file into `directory`, and on rank 0 the index. Collective in a gang."""

    def write() -> bytes:
        return encode_index(_write_all(state, directory, gang))

    rows = gang.agree(write)
    with agreed(gang), scratch_errors(directory):
        if gang.is_leader:
            shares = [decode_tensors(row, source=f"of rank {rank}") for rank, row in enumerate(rows)]
            (directory / INDEX_FILE).write_bytes(encode_index(merge_tensors(shares).values()))


def _write_all(state: Mapping[str, torch.Tensor], directory: Path, gang: Gang) -> list[ShardTensor]:
    """Write this rank's file, also if it has no tensor to write, and return what it wrote.

    Ranks that share layers gather the columns of each tensor in turn, which is collective: a rank that cannot write
    still takes part for all tensors, and raises at the end.
    """
    file: BinaryIO | None = None
    failure: BaseException | None = None
    written: list[ShardTensor] = []
    with contextlib.ExitStack() as opened:
        for name, tensor in state.items():
            local, start, is_mine = _rows(name, tensor, gang)
            if failure is not None or not is_mine:
                continue
            try:
                with scratch_errors(directory):
                    if file is None:
                        file = opened.enter_context(_open(directory, gang))
                    written.append(_write(name, tensor, local, start, file))
            except MillraceError as error:
                failure = error
        if file is None and failure is None:
            with scratch_errors(directory):
                opened.enter_context(_open(directory, gang))  # every rank has a file
        if failure is None:
            with scratch_errors(directory):
                opened.close()
    if failure is not None:
        raise failure
    return written


def _open(directory: Path, gang: Gang) -> BinaryIO:
    directory.mkdir(exist_ok=True)
    return (directory / f"rank-{gang.rank:05d}.bin").open("xb")


def _rows(name: str, tensor: torch.Tensor, gang: Gang) -> tuple[torch.Tensor, int, bool]:
    """Return this rank's complete rows, the index of their first element, and whether this rank writes them."""
    if not isinstance(tensor, DTensor):
        return tensor, 0, gang.is_leader or name.startswith(RANDOM_STATE)
    share = held(tensor, is_first_part=gang.layout.is_first_part(gang.rank))
    return share.rows(), share.start, share.writes


def needed_files(state: Mapping[str, torch.Tensor], index: ShardIndex) -> set[str]:
    """Return the names of the files with elements that this rank holds of `state`.

    Raises InvalidStateError unless names, shapes and dtypes of `state` are exactly the saved ones: a missing tensor
    would silently keep its start value. Random states may be missing or left over, because there may be more or fewer
    ranks than wrote the checkpoint.
    """
    saved = {name for name in index if not name.startswith(RANDOM_STATE)}
    live = {name for name in state if not name.startswith(RANDOM_STATE)}
    if saved != live:
        raise _mismatch(f"missing {sorted(live - saved)[:5]}, left over {sorted(saved - live)[:5]}")
    files: set[str] = set()
    for name, tensor in state.items():
        if (entry := index.get(name)) is None:
            continue
        dtype = _tag(tensor)
        if (entry.shape, entry.dtype) != (tuple(tensor.shape), dtype):
            raise _mismatch(f"{name} is {entry.dtype}{list(entry.shape)}, the model's is {dtype}{list(tensor.shape)}")
        share = _range(tensor)
        files |= {piece.file for piece in entry.pieces if _overlap(piece, share) is not None}
    return files


def load_shards(state: Mapping[str, torch.Tensor], directory: Path, index: ShardIndex) -> None:
    """Fill what this rank holds of `state`, in place, from a directory with the `needed_files`, verified before.

    A tensor that the index lacks stays as it is. Raises UnavailableError if a file was cut short meanwhile.
    """
    for name, tensor in state.items():
        share, entry = _range(tensor), index.get(name)
        if entry is None or share.end == share.start:
            continue
        data = bytearray((share.end - share.start) * entry.element_bytes)
        for piece in entry.pieces:
            if (common := _overlap(piece, share)) is not None:
                _read(directory / piece.file, piece, common, share, memoryview(data), width=entry.element_bytes)
        found = torch.frombuffer(data, dtype=tensor.dtype)
        if isinstance(tensor, DTensor):
            mine = held(tensor)
            mine.fill(found.reshape(mine.shape))
        else:
            with torch.no_grad():
                tensor.copy_(found.reshape(tensor.shape))


def _range(tensor: torch.Tensor) -> _Range:
    if not isinstance(tensor, DTensor):
        return _Range(0, tensor.numel())
    share = held(tensor)
    return _Range(share.start, share.start + share.num_elements)


def _write(name: str, tensor: torch.Tensor, local: torch.Tensor, start: int, file: BinaryIO) -> ShardTensor:
    """Append `local`, this rank's part of `tensor` from element `start`, to `file`; return its entry for the index."""
    count, pieces = local.numel(), ()
    if count:
        pieces = (ShardPiece(Path(file.name).name, file.tell(), start, count),)
        file.write(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return ShardTensor(name=name, dtype=_tag(tensor), shape=tuple(tensor.shape), pieces=pieces)


def _overlap(piece: ShardPiece, share: _Range) -> tuple[int, int] | None:
    """Return the range of elements that a piece and a share have in common."""
    begin, end = max(piece.start, share.start), min(piece.start + piece.count, share.end)
    return (begin, end) if begin < end else None


def _read(
    path: Path, piece: ShardPiece, common: tuple[int, int], share: _Range, data: memoryview, *, width: int
) -> None:
    begin, end = common
    target = data[(begin - share.start) * width : (end - share.start) * width]
    with path.open("rb", buffering=0) as file:
        file.seek(piece.offset + (begin - piece.start) * width)
        while len(target):
            if not (count := file.readinto(target)):
                raise UnavailableError(
                    f"{path} was cut short after it had been verified",
                    reason="SCRATCH_UNUSABLE",
                    remedy="see what else writes to MILLRACE_SCRATCH_DIR",
                )
            target = target[count:]


def _tag(tensor: torch.Tensor) -> str:
    """Return torch's name of a tensor's dtype; raise InvalidStateError if checkpoints do not support it."""
    tag = str(tensor.dtype).removeprefix("torch.")
    if tag not in DTYPE_TAGS:
        raise InvalidStateError(
            f"checkpoints do not carry tensors of {tag} (known: {', '.join(DTYPE_TAGS)})",
            reason="TENSOR_DTYPE_UNKNOWN",
            remedy="train in float32 or bfloat16",
        )
    return tag


def _mismatch(what: str) -> InvalidStateError:
    return InvalidStateError(
        f"checkpoint tensors do not fit the model: {what}",
        reason="CHECKPOINT_MISMATCH",
        remedy="resume with the model that wrote the checkpoint",
    )
