"""The checkpoints of a fine-tuning, the record of its data, and the directories that it writes.

They are in the run's own directory. A run that is started again continues from the newest checkpoint, also to more
steps; it is refused if a key changed that makes it another training.
"""

import contextlib
import hashlib
import json
import logging
import math
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from millrace.config.sections.sft import SFTConfig, SFTEvalConfig
from millrace.decoding import decode_object
from millrace.errors import CapacityError, InvalidSpecError, InvalidStateError, UnavailableError, Violation
from millrace.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_small_files
from millrace.policies.peft.config import AdapterSpec, base_model_name
from millrace.policies.tensors import TensorBytes, plan_safetensors
from millrace.runlog import ZERO_CHAIN_HASH, Names
from millrace.storage.clean_up import RetryPolicy, remove
from millrace.storage.local import LocalStore
from millrace.storage.scratch import io_errors
from millrace.telemetry import waits
from millrace.trainer.checkpoint.manifest import Author
from millrace.trainer.checkpoint.resume import Checkpointer, describe, resume
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.learner import state_tensors
from millrace.trainer.learning.optimizer import PolicyOptimizer
from millrace.trainer.model.lora import adapted_layers, weight_tensors
from millrace.trainer.model.published import described_tensors, merged_tensors, policy_tensors

# Writes the trained model as Hugging Face directories.

_WHAT = "directory of a model"


def save_model(model: nn.Module, *, files: Mapping[str, bytes], target: Path, dtype: torch.dtype, gang: Gang) -> Path:
    """Write the model with adapters merged, in the format `dtype`, with the small `files`, as the directory `target`.

    Replaces a directory of that name once all is written, and returns it. Collective in a gang.
    """
    return write_directory(
        target,
        files,
        weights="model.safetensors",
        described=described_tensors(model, dtype=dtype),
        tensors=merged_tensors(model, dtype=dtype),
        gang=gang,
    )


def save_adapter(
    model: nn.Module,
    adapter: AdapterSpec,
    *,
    base: str,
    files: Mapping[str, bytes],
    target: Path,
    dtype: torch.dtype,
    gang: Gang,
) -> Path:
    """Write the adapters alone as the directory `target`, as PEFT reads it, replaced once all is written. Collective.

    `files` are the small files of the whole model, of which all but config.json are written, too. `base` is the
    config's name of the base model. Returns the directory.
    """
    config = adapter.to_config(base_model=base_model_name(base))
    return write_directory(
        target,
        {**adapter_small_files(files), ADAPTER_CONFIG: config},
        weights=ADAPTER_WEIGHTS,
        described=described_tensors(model, dtype=dtype, version=1),
        tensors=policy_tensors(model, dtype=dtype, version=1),
        gang=gang,
    )


def require_mergeable(model: nn.Module) -> None:
    """Raise InvalidStateError if an adapter is on a weight that another layer shares, because merging changes both."""
    names = weight_tensors(model)
    parameters = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name, layer in adapted_layers(model).items():
        if f"{name}.weight" not in names or parameters.count(id(layer.weight)) > 1:
            raise InvalidStateError(
                f"model.lora.target_modules names {name}, whose weight is tied to another layer's",
                reason="LORA_TARGET_TIED",
                remedy="leave it out: the adapter cannot be merged into the saved model",
            )


def try_to_save(files: Mapping[str, bytes], *, target: Path, num_bytes: int) -> None:
    """Check that a model can be saved as `target`: write its small files to a directory beside it, and delete that.

    Raises PermissionDeniedError or UnavailableError (DIRECTORY_UNUSABLE) if they cannot be written, and CapacityError
    (DISK_FULL) if the disk has no room for the weights, which take `num_bytes`.
    """
    fresh = target.with_name(f".{target.name}.new")
    with io_errors(target, "write", setting=None):
        try:
            _write_small(fresh, files)
        finally:
            remove(fresh, what=_WHAT)
    require_room(target.parent, num_bytes, what="the model takes")


def require_room(directory: Path, num_bytes: int, *, what: str) -> None:
    """Raise CapacityError (DISK_FULL) if the disk of `directory` has less than `num_bytes` free.

    `what` begins the sentence of what needs the room ("the model takes").
    """
    with io_errors(directory, "look at", setting="output_dir"):
        free_bytes = shutil.disk_usage(directory).free
    if free_bytes < num_bytes:
        raise CapacityError(
            f"{directory} has {free_bytes} bytes free, and {what} {num_bytes}",
            reason="DISK_FULL",
            remedy="free disk space, or name a directory on another disk with output_dir",
        )


def num_bytes_of(described: Iterable[tuple[str, str, tuple[int, ...]]]) -> int:
    """Return the total bytes of tensors that are described by (name, number format, shape)."""
    return sum(math.prod(shape) * getattr(torch, tag).itemsize for _, tag, shape in described)


def write_directory(
    target: Path,
    files: Mapping[str, bytes],
    *,
    weights: str,
    described: Iterable[tuple[str, str, tuple[int, ...]]],
    tensors: Iterable[tuple[str, TensorBytes]],
    gang: Gang,
) -> Path:
    """Write the small `files`, and tensors as the safetensors file `weights`, as the directory `target`, at rank 0.

    Replaces a directory of that name once all is written, and returns it. `described` has (name, number format, shape)
    of `tensors`, in order. Each tensor is written before the next one is gathered, so that no rank holds more than one
    whole tensor. Collective.
    """
    fresh = target.with_name(f".{target.name}.new")
    with contextlib.ExitStack() as opened:
        file, failure = None, None
        with agreed(gang), io_errors(target, "write", setting=None):
            if gang.is_leader:
                _write_small(fresh, files)
                file = opened.enter_context((fresh / weights).open("wb"))
                file.write(plan_safetensors(described)[0])
        for _, tensor in tensors:
            if file is not None and failure is None:
                try:
                    file.write(tensor.data)
                except OSError as error:  # the others wait for this rank at the next tensor, and raise it at the end
                    failure = error
            # Freed before the next one is gathered.
            del tensor
        with agreed(gang), io_errors(target, "write", setting=None):
            if failure is not None:
                raise failure
            if file is not None:
                file.close()
                replace_directory(fresh, target)
    return target


def replace_directory(fresh: Path, target: Path) -> None:
    """Rename the directory `fresh` to `target`, and delete the old `target`, which stays if the renaming fails."""
    aside = target.with_name(f".{target.name}.old")
    if remove(aside, what=_WHAT) is not None:  # the remains of an earlier save cannot be removed: take another name
        aside = aside.with_name(f"{aside.name}-{secrets.token_hex(4)}")
    # The old directory is deleted only after the new one is in its place.
    if target.exists():
        target.rename(aside)
    try:
        fresh.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    remove(aside, what=_WHAT)


def _write_small(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files, by name, into a new directory, after removing one that an earlier attempt left.

    Raises InvalidStateError if that cannot be removed.
    """
    if (left := remove(directory, what=_WHAT)) is not None:
        raise InvalidStateError(
            str(left),
            reason="DIRECTORY_UNUSABLE",
            remedy="remove it, or name another directory with output_dir",
        )
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


# Hands the weights of due steps to the command that started the training, which evaluates them.
#
# They are in `evals/due` of the run's directory, as Hugging Face directories that appear whole: `step-N`, or `last-N`
# for the trained model. The command takes them in order and removes each once its figures are written. Its results
# are in `evals/step-N`.

DIRECTORY, DUE, BEGUN, FIGURES = "evals", "due", "begun", "eval.json"
_NAME = re.compile(r"(?:step|last)-(\d+)")
_LOOK_S = 0.2
SAY_AFTER_S = 1.0
_SLACK_S = 300.0
"""Time for the start and the end of the processes of an evaluation, in addition to `eval.timeout_s`."""


class Handover:
    """Writes due weights, and waits while too many of them are not evaluated. Collective in a gang."""

    def __init__(
        self,
        config: SFTEvalConfig | None,
        output: Path,
        *,
        model: nn.Module,
        files: Mapping[str, bytes],
        dtype: torch.dtype,
        gang: Gang,
    ) -> None:
        """Hand over weights of `model` below the run's directory `output`; with `config` None nothing is ever due.

        `files` are the small files of a saved model, and `dtype` is its number format.
        """
        self._config = config
        self._root = output / DIRECTORY
        self._model = model
        self._files = files
        self._dtype = dtype
        self._gang = gang

    @property
    def most(self) -> int:
        """Return how many saved weights may be waiting on the disk for evaluation; 0 if nothing is evaluated."""
        return 0 if self._config is None else self._config.max_pending

    def begin(self, step: int) -> None:
        """Remove weights and evaluations of steps after `step` (all of them at 0), which are trained again.

        Writes `evals/begun`, for which the command that evaluates waits. Does nothing if nothing is evaluated.
        Collective.
        """
        if self._config is None:
            return
        with agreed(self._gang), io_errors(self._root, "write", setting="output_dir"):
            if not self._gang.is_leader:
                return
            (self._root / DUE).mkdir(parents=True, exist_ok=True)
            again = [*found(self._root), *found(self._root / DUE)]
            left = [path for path in (self._root / DUE).iterdir() if path.name.startswith(".")]
            for path in [*left, *(path for path in again if step == 0 or step_of(path) > step)]:
                remove(path, what="weights or evaluations of an earlier command")
            # Last: the command that evaluates waits for it, and must not take weights that are trained again.
            (self._root / BEGUN).write_text(f"{step}\n")

    def maybe_hand_over(self, step: int, *, is_last: bool = False) -> None:
        """Write the weights after step `step` if an evaluation is due then and has not been done or handed over.

        `is_last` says that they are the trained model's. Collective. Waits while `max_pending` weights are not
        evaluated; raises UnavailableError (EVALUATION_STUCK) if that takes longer than the deadlines of their
        evaluations.
        """
        config = self._config
        if config is None or not config.due(step, is_last=is_last) or self._gang.from_leader(lambda: self._has(step)):
            return
        self._wait_for_room(step, config)
        target = self._root / DUE / f"{'last' if is_last else 'step'}-{step}"
        save_model(self._model, files=self._files, target=target, dtype=self._dtype, gang=self._gang)

    def _has(self, step: int) -> bool:
        """Return whether the weights of a step are handed over, or evaluated already."""
        is_due = any(step_of(path) == step for path in found(self._root / DUE))
        return is_due or (self._root / f"step-{step}" / FIGURES).exists()

    def _wait_for_room(self, step: int, config: SFTEvalConfig) -> None:
        """Wait until fewer than `max_pending` weights are not evaluated, before those of step `step` are written.

        Collective. Raises UnavailableError (EVALUATION_STUCK) after the evaluations' deadlines.
        """
        began, deadline_s = time.monotonic(), config.max_pending * (config.timeout_s + _SLACK_S)
        is_reported = False
        with waits.waiting(f"evaluations before that of step {step}", waits_on="inference", deadline_s=deadline_s):
            # Rank 0 decides for all: ranks that saw other directories or clocks would leave the loop at other turns.
            while self._gang.from_leader(lambda: len(found(self._root / DUE))) >= config.max_pending:
                age_s = time.monotonic() - began
                if self._gang.is_leader and not is_reported and age_s > SAY_AFTER_S:
                    is_reported = True
                    logger.warning(
                        f"training waits after step {step}: {config.max_pending} evaluations are not over "
                        "(eval.max_pending)"
                    )
                if self._gang.from_leader(lambda: time.monotonic() - began > deadline_s):
                    raise UnavailableError(
                        f"no evaluation ended within {deadline_s:g} s, and that of step {step} is due",
                        reason="EVALUATION_STUCK",
                        remedy="see evals/step-N/logs; start the command again, which goes on from the last checkpoint",
                    )
                time.sleep(_LOOK_S)
        if is_reported:
            logger.warning(f"training goes on after {time.monotonic() - began:.1f} s")


def found(directory: Path) -> list[Path]:
    """Return the entries of a directory that are named by a step (`step-N`, `last-N`), in the order of the steps."""
    return sorted(_named(directory), key=step_of)


def _named(directory: Path) -> Iterator[Path]:
    """Yield the entries of a directory that are named by a step, in any order."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if _NAME.fullmatch(path.name):
            yield path


def step_of(path: Path) -> int:
    """Return the step in the name of a path that `found` returned."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


logger = logging.getLogger(__name__)

_NAMES = Names("sft", "run")  # the same for all runs, because every run has its own directory
_RECORD = f"{_NAMES.root}training.json"
_MAX_RECORD_BYTES = 1 << 20
# Only a full disk is tried again, and nothing of this command makes room there but the removal of old checkpoints.
_RETRY = RetryPolicy(deadline_s=5.0)
_MAY_CHANGE = (
    "max_steps",
    "max_skipped_steps",
    "micro_batch_tokens",
    "output_dir",
    "ckpt",
    "eval",
    "inference",
    "inference_gpu_ids",
    "log",
    "pack",
    "run",
    "val",
    "wandb",
)
"""Keys and tables that may change when a training is continued: how long, where, and what is shown."""


class SFTCheckpoints:
    """Saves and restores the state of one run: model, optimizer, and the position in the data. Collective in a gang."""

    def __init__(
        self,
        config: SFTConfig,
        directory: Path,
        *,
        model: nn.Module,
        optimizer: PolicyOptimizer,
        gang: Gang,
        data: Mapping[str, Any],
        base_digest: str = "",
    ) -> None:
        """Take the training's state; `directory` gets the checkpoints, unless the config has none.

        `data` identifies the rows: a training with other `data` is not continued. `base_digest` is that of the base of
        adapters, or "".
        """
        self._model = model
        self._optimizer = optimizer
        self._gang = gang
        self._position = torch.zeros((), dtype=torch.int64)
        self._checkpointer: Checkpointer | None = None
        if config.ckpt is None:
            return
        self._training = {**_flat(_training(config)), **data}
        self._run_hash = hashlib.sha256(json.dumps(self._training, sort_keys=True).encode()).hexdigest()
        self._store = LocalStore(directory, setting="output_dir", retry=_RETRY)
        self._checkpoints = CheckpointStore(self._store, _NAMES, gang=gang, is_logged=False)
        self._author = Author(run_hash=self._run_hash, epoch=0, determinism="best_effort", base_digest=base_digest)
        self._checkpointer = Checkpointer(self._checkpoints, config.ckpt, gang=gang, author=self._author)
        self._resume_step = config.ckpt.resume_step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the checkpoint under way, or abandon it after an error of the training."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(kind, error, traceback)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of one checkpoint's tensors; 0 if the config has no checkpoints."""
        if self._checkpointer is None:
            return 0
        tensors = state_tensors(self._model, self._optimizer, gang=self._gang).values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def resume(self, *, max_steps: int | None) -> tuple[int, int, int]:
        """Fill the training's state from the newest whole checkpoint, if there is one. Collective.

        Returns the next step, the position of its rows in the data, and the number of steps in a row before it that
        were skipped; all 0 without a checkpoint. Raises InvalidSpecError if a key changed that may not, if `max_steps`
        is exceeded, or if `ckpt.resume_step` is another step.
        """
        if self._checkpointer is None:
            return 0, 0, 0
        self._gang.agree(self._require_same_training)
        found = resume(
            self._checkpoints,
            self._model,
            self._optimizer,
            gang=self._gang,
            author=self._author,
            more={"data.position": self._position},
        )
        if found.damaged:
            logger.warning(f"damaged checkpoints are left aside: {describe(found)}; going on from {found.start}")
        step, num_skipped = (0, 0) if found.manifest is None else (found.manifest.step, found.manifest.num_skipped)
        # None and -1 are the newest checkpoint, whichever it is.
        if self._resume_step not in (None, -1, step):
            problem = Violation(
                field="ckpt.resume_step",
                value=str(self._resume_step),
                message=f"is not that of the newest checkpoint, {step}, which fine-tuning goes on from",
            )
            raise InvalidSpecError(
                [problem], remedy="leave it out, or begin from a model directory under another run.name"
            )
        if max_steps is not None and step > max_steps:
            problem = Violation(
                field="max_steps", value=str(max_steps), message=f"is less than the {step} steps that the run has made"
            )
            raise InvalidSpecError([problem], remedy="raise it, or give the new training another run.name")
        return step, int(self._position), num_skipped

    def maybe_save(self, step: int, *, position: int, num_skipped: int, is_last: bool) -> None:
        """Save a checkpoint after `step` steps if it is due or `is_last`; do nothing if the config has no checkpoints.

        `position` is that of the next rows in the data, and `num_skipped` the steps in a row that changed nothing.
        Raises what saving an earlier one raised. Collective.
        """
        if self._checkpointer is None:
            return
        self._checkpointer.raise_failure()
        if is_last or self._checkpointer.is_due(step):
            self._position.fill_(position)
            state = state_tensors(self._model, self._optimizer, gang=self._gang) | {"data.position": self._position}
            self._checkpointer.save(state, step=step, lineage=0, chain_hash=ZERO_CHAIN_HASH, num_skipped=num_skipped)

    def _require_same_training(self) -> None:
        """Raise InvalidSpecError at rank 0 with each key that differs from the training whose checkpoints these are.

        Without checkpoints or record, write the record of this training.
        """
        if not self._gang.is_leader:
            return
        if next(iter(self._checkpoints.steps()), None) is None or self._store.head(_RECORD) is None:
            self._store.put(_RECORD, json.dumps(self._training, sort_keys=True, indent=1).encode())
            return
        saved = decode_object(
            self._store.get(_RECORD, max_bytes=_MAX_RECORD_BYTES),
            what=f"the record {self._store.uri(_RECORD)}",
            reason="TRAINING_RECORD_INVALID",
            remedy="delete it, if the config is the one that the run was started with",
            max_bytes=_MAX_RECORD_BYTES,
        )
        changed = [
            Violation(
                field=key,
                value=json.dumps(self._training.get(key)),
                message=f"was {json.dumps(saved.get(key))} in the checkpoints of this run, which makes it another "
                "training",
            )
            for key in sorted(saved.keys() | self._training.keys())
            if saved.get(key) != self._training.get(key)
        ]
        if changed:
            remedy = "set it back to continue the run, or give the new training another run.name"
            raise InvalidSpecError(changed, remedy=remedy)


def _training(config: SFTConfig) -> dict[str, Any]:
    """Return the keys of the config that decide what is learned, without those that may change."""
    document = config.model_dump(mode="json")
    del document["model"]["publish_dtype"]
    return {key: value for key, value in document.items() if key not in _MAY_CHANGE}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a tree of tables as one table with dotted keys, each after `prefix`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
