"""Sharded tensor files (`torch.distributed.checkpoint`) in a local directory.

A state is a flat dict of tensors by name; nothing else is saved, so nothing else is unpickled. The library's own
metadata file is a pickle: it is read with an unpickler that knows the library's metadata classes and nothing more, and
the shards with `weights_only`.
"""

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from millrace.errors import CorruptObjectError, InternalError, MillraceError, UnavailableError
from millrace.storage.scratch import scratch_errors
from millrace.telemetry import logging

log = logging.getLogger(__name__)

METADATA_FILE = ".metadata"
_DEFECTS = (TypeError, ValueError, LookupError, AttributeError, AssertionError, pickle.PickleError)
_ALLOWED_MODULES = frozenset({"torch.distributed.checkpoint.metadata"})
_ALLOWED = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("pathlib", "Path"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    }
)


def save_shards(state: Mapping[str, torch.Tensor], directory: Path, *, is_alone: bool) -> None:
    """Writes this rank's shards into `directory`, and on rank 0 the metadata. Collective unless `is_alone`."""
    # What every rank holds goes to rank 0's file: spread over all, each rank would need every file to load.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with warnings.catch_warnings(), _library_errors(directory, "save a checkpoint to"):
        warnings.simplefilter("ignore", UserWarning)  # "assuming the intent is to save in a single process": it is
        save(dict(state), storage_writer=_Writer(directory), planner=planner, no_dist=is_alone)


def needed_files(state: Mapping[str, torch.Tensor], directory: Path) -> set[str]:
    """Names of the shard files that hold what this rank loads into `state`, by the metadata file in `directory`.

    Of a checkpoint of as many ranks that is what this rank has written, and rank 0's file.
    """
    metadata = _SafeReader(directory).read_metadata()
    _require_names(state, metadata)
    try:
        plan = create_default_local_load_plan(dict(state), metadata)
    except ValueError as error:
        raise _mismatch(str(error)) from error
    return {metadata.storage_data[item.storage_index].relative_path for item in plan.items}


def load_shards(state: Mapping[str, torch.Tensor], directory: Path, *, is_alone: bool) -> None:
    """Fills the tensors of `state` in place from a directory that holds every shard; CorruptObjectError if it cannot.

    The names must be exactly the saved ones: a tensor that is missing or left over would be a silent reset. Only the
    random states of other ranks may be left over.
    """
    reader = _SafeReader(directory)
    _require_names(state, reader.read_metadata())
    with warnings.catch_warnings(), _library_errors(directory, "load a checkpoint from"):
        warnings.simplefilter("ignore", UserWarning)
        load(dict(state), storage_reader=reader, no_dist=is_alone)


def _require_names(state: Mapping[str, torch.Tensor], metadata: Metadata) -> None:
    """CorruptObjectError unless the names are exactly the saved ones, but for random states of other ranks."""
    saved = {name for name in metadata.state_dict_metadata if name in state or not name.startswith("rng.")}
    if saved != set(state):
        raise _mismatch(f"missing {sorted(set(state) - saved)[:5]}, left over {sorted(saved - set(state))[:5]}")


class _Writer(FileSystemWriter):
    """The library's writer; what the operating system refuses is our error, which reaches every rank as it is."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Writes this rank's files."""
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:  # what is behind it does not survive the way to the other ranks
            _raise_refusal(error, Path(self.path))
            log.exception("a checkpoint cannot be written")
            raise


@contextlib.contextmanager
def _library_errors(directory: Path, action: str) -> Iterator[None]:
    """Turns the library's error, which no `except Exception` catches, into the one behind it; the same at every rank.

    What is none of ours becomes InternalError if it would come again, and else UnavailableError: too little memory.
    """
    try:
        yield
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        for failure in failures:
            if isinstance(failure, MillraceError) or not isinstance(failure, Exception):
                raise failure from error
            _raise_refusal(failure, directory)
        comes_again = isinstance(failures[0], _DEFECTS)
        raise (InternalError if comes_again else UnavailableError)(
            f"cannot {action} {directory} at ranks {sorted(error.failures)}: "
            f"{type(failures[0]).__name__}: {failures[0]}",
            reason="CHECKPOINT_FAILED",
            remedy="see the log of that rank",
        ) from error


def _raise_refusal(error: Exception, directory: Path) -> None:
    """Raises what the operating system refused, if that is behind it: a full disk shows where a file is closed."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        with scratch_errors(directory):
            raise cause from error


def _mismatch(what: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"checkpoint tensors do not fit the model: {what}",
        reason="CHECKPOINT_MISMATCH",
        remedy="resume with the model and world size that wrote the checkpoint",
    )


def _enum_member(owner: Any, name: Any) -> Enum:
    """Stands for `getattr`, by which early releases of Python 3.11 pickle enumerations' members; does nothing else."""
    if isinstance(owner, type) and issubclass(owner, Enum) and isinstance(name, str) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) does not belong in checkpoint metadata")


class _MetadataUnpickler(pickle.Unpickler):
    """Loads the library's metadata and refuses every other global."""

    def find_class(self, module: str, name: str) -> Any:
        """The named global, if it belongs to the metadata."""
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module in _ALLOWED_MODULES or (module, name) in _ALLOWED or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in checkpoint metadata")


class _SafeReader(FileSystemReader):
    """The library's reader with a metadata file that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the directory; CorruptObjectError if it is not what the library writes."""
        path = Path(self.path) / METADATA_FILE
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError) as error:
            raise CorruptObjectError(
                f"checkpoint metadata {path.name} is not readable: {error}",
                reason="CHECKPOINT_METADATA_INVALID",
                remedy="delete this checkpoint; the run then resumes from the one before",
            ) from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
