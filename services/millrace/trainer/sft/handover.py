"""Hands the weights of due steps to the command beside the training, which evaluates them.

They lie in `evals/due` of the run's directory, as Hugging Face directories that appear whole: `step-N`, or `last-N` for
the trained model. The command takes them in order and removes each once its figures are written. What it makes of them
lies in `evals/step-N`.
"""

import logging
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from millrace.config.sections.sft import SFTEvalConfig
from millrace.errors import UnavailableError
from millrace.storage.clean_up import remove
from millrace.storage.disk import io_errors
from millrace.telemetry import waits
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.sft.saving import save_model

logger = logging.getLogger(__name__)

DIRECTORY, DUE, BEGUN, FIGURES = "evals", "due", "begun", "eval.json"
_NAME = re.compile(r"(?:step|last)-(\d+)")
_LOOK_S = 0.2
SAY_AFTER_S = 1.0
_SLACK_S = 300.0
"""For the start and the end of what plays an evaluation, beyond `eval.timeout_s`."""


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
        """`files` and `dtype` are those of the model that is saved at the end; without a config nothing is due."""
        self._config = config
        self._root = output / DIRECTORY
        self._model = model
        self._files = files
        self._dtype = dtype
        self._gang = gang

    @property
    def most(self) -> int:
        """How many copies of the weights may lie on the disk at once."""
        return 0 if self._config is None else self._config.max_pending

    def begin(self, step: int) -> None:
        """Go on from a step: what is there of later ones is of weights that are made again, and is removed."""
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
            (self._root / BEGUN).write_text(f"{step}\n")

    def maybe_hand_over(self, step: int, *, is_last: bool = False) -> None:
        """Write the weights behind a step if an environment is due and has not been evaluated with them.

        UnavailableError (EVALUATION_STUCK) if room is not made within the deadlines of the evaluations before it.
        """
        config = self._config
        if config is None or not config.due(step, is_last=is_last) or self._gang.from_leader(lambda: self._has(step)):
            return
        self._wait_for_room(step, config)
        target = self._root / DUE / f"{'last' if is_last else 'step'}-{step}"
        save_model(self._model, files=self._files, target=target, dtype=self._dtype, gang=self._gang)

    def _has(self, step: int) -> bool:
        is_due = any(step_of(path) == step for path in found(self._root / DUE))
        return is_due or (self._root / f"step-{step}" / FIGURES).exists()

    def _wait_for_room(self, step: int, config: SFTEvalConfig) -> None:
        began, deadline_s = time.monotonic(), config.max_pending * (config.timeout_s + _SLACK_S)
        is_said = False
        with waits.waiting(f"evaluations before that of step {step}", waits_on="inference", deadline_s=deadline_s):
            while self._gang.from_leader(lambda: len(found(self._root / DUE))) >= config.max_pending:
                age_s = time.monotonic() - began
                if self._gang.is_leader and not is_said and age_s > SAY_AFTER_S:
                    is_said = True
                    logger.warning(
                        f"training waits behind step {step}: {config.max_pending} evaluations are not over "
                        "(eval.max_pending)"
                    )
                if self._gang.from_leader(lambda: time.monotonic() - began > deadline_s):
                    raise UnavailableError(
                        f"no evaluation ended within {deadline_s:g} s, and that of step {step} is due",
                        reason="EVALUATION_STUCK",
                        remedy="see evals/step-N/logs; start the command again, which goes on from the last checkpoint",
                    )
                time.sleep(_LOOK_S)
        if is_said:
            logger.warning(f"training goes on after {time.monotonic() - began:.1f} s")


def found(directory: Path) -> list[Path]:
    """Return what stands in a directory under the name of a step, in the order of the steps."""
    return sorted(_named(directory), key=step_of)


def _named(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir() if directory.is_dir() else ():
        if _NAME.fullmatch(path.name):
            yield path


def step_of(path: Path) -> int:
    """Return the step that a directory is named by."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])
