"""Evaluations during a fine-tuning: saved weights are played as `millrace eval` plays a directory.

The trainer puts the weights to evaluate into `evals/due` of the run (`trainer.sft.saving`). Each evaluation starts a
local stack in `evals/step-N`; if a command is killed, the next one continues there. Its figures become one line of
`metrics.jsonl`.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from millrace.cli.errors import CliError
from millrace.cli.evals.prepare import PreparedEval
from millrace.cli.evals.session import RESULTS_NAME, OtherEvaluationError, evaluate_here, figures, table
from millrace.cli.interrupts import Interrupts
from millrace.cli.view.progress import write_eval_plot
from millrace.cli.view.text import printable
from millrace.config import EvalRunConfig, SFTConfig
from millrace.config.sections.inference import InferenceConfig
from millrace.config.sections.sft import SFTEvalConfig
from millrace.decoding import decode_object
from millrace.errors import InvalidStateError, MillraceError, of_system
from millrace.inference.launch_env import engine_python, with_engine
from millrace.local import gpus
from millrace.storage.clean_up import remove
from millrace.telemetry.settings import Settings

DIRECTORY, DUE, BEGUN = "evals", "due", "begun"
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEngine:
    """The engine that serves the evaluated weights, and the GPUs it uses."""

    inference: InferenceConfig
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def engine_beside(
    config: SFTConfig, environ: Mapping[str, str] = os.environ
) -> tuple[EvaluationEngine, tuple[int, ...] | None]:
    """Return the engine of a fine-tuning's evaluations, and the GPUs left for the training.

    None instead of GPUs on a machine without any. Raises InvalidStateError (GPU_UNUSABLE) if a GPU is missing, or if
    vLLM would share one with the training.
    """
    inference = with_engine(config.inference, environ)
    engine_python(inference.engine, environ)  # NotFoundError before anything starts
    size = inference.parallel.tp * inference.parallel.dp if inference.engine == "vllm" else 0
    there = gpus.training_gpus(environ)
    assigned = gpus.assign(there, engine_size=size, inference=config.inference_gpu_ids)
    gpus.require(assigned, gpus.machine_gpus(environ))
    if inference.engine == "vllm" and gpus.are_shared(assigned):
        shown = ", ".join(map(str, there))
        raise InvalidStateError(
            f"vLLM would evaluate on a GPU that the training takes whole: this machine shows {shown}",
            reason="GPU_UNUSABLE",
            remedy='set `inference.engine = "embedded"`, which evaluates on the CPU, or leave [eval] out and evaluate '
            "the model after the training",
        )
    own = {"inference": assigned["inference"]} if "inference" in assigned else {}
    return EvaluationEngine(inference=inference, gpus=own), assigned.get("trainer")


class Evaluations:
    """Plays the weights in `evals/due` one after the other, and writes the figures."""

    def __init__(self, config: SFTConfig, evaluation: SFTEvalConfig, directory: Path, engine: EvaluationEngine) -> None:
        """Set up the evaluations of the fine-tuning in `directory`, and remove the mark of an earlier command."""
        self._config = config
        self._evaluation = evaluation
        self._directory = directory
        self._root = directory / DIRECTORY
        self._engine = engine
        self._is_over = asyncio.Event()
        self._failed: list[str] = []
        remove(self._root / BEGUN, what="mark of an earlier command")

    async def run(self, interrupts: Interrupts) -> None:
        """Evaluate weights as they become due; return once `finish` was called and none is left."""
        # unregistered wait: it looks at a directory for as long as the training takes, which the command shows
        while True:
            # Read before the look at the directory: what was put there before `finish` was called is then seen.
            is_over = self._is_over.is_set()
            due = self._due() if (self._root / BEGUN).exists() else []
            if due:
                await self._evaluate(due[0], interrupts)
            elif is_over:
                return
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_over.wait(), _LOOK_S)

    async def finish(self, task: "asyncio.Task[None]") -> None:
        """Wait until `task`, which runs `run`, has evaluated what is left; then write and print the summary."""
        self._is_over.set()
        if left := len(self._due()):
            most_s = left * self._evaluation.timeout_s
            click.echo(f"the training is over; {left} evaluations are left (at most {most_s:g} s)", err=True)
        await task
        if (data := self._write_summary())["policies"]:
            click.echo("\n".join(["", *table(data), str(self._directory / RESULTS_NAME)]), err=True)
        for text in self._failed:
            click.echo(f"warning: {text}", err=True)

    def _due(self) -> list[Path]:
        """Return the directories of weights that are to be evaluated, sorted by step."""
        places = self._root / DUE
        found = [path for path in places.iterdir() if path.name[0] != "."] if places.is_dir() else []
        return sorted(found, key=_step_of)

    async def _evaluate(self, weights: Path, interrupts: Interrupts) -> None:
        """Evaluate one directory of weights, write the figures or a warning with the reason, and remove the weights."""
        step = _step_of(weights)
        logs = self._root / f"step-{step}.log"
        try:
            with logs.open("a", encoding="utf-8") as log:
                async with asyncio.timeout(self._evaluation.timeout_s):
                    prepared = self._prepare(weights)
                    try:
                        data, _ = await evaluate_here(prepared, interrupts, stream=log)
                    except OtherEvaluationError as error:
                        log.write(f"begun anew: {error.message}\n")
                        remove(self._root / f"step-{step}", what="an evaluation with other settings")
                        data, _ = await evaluate_here(prepared, interrupts, stream=log)
            self._write_line(step, data)
            self._say(step, data)
        except TimeoutError:
            self._fail(step, f"is given up after {self._evaluation.timeout_s:g} s (eval.timeout_s)", "EVAL_TIMED_OUT")
        except CliError as error:
            self._fail(step, f"failed: {error.message}", "EVAL_FAILED", place=error.place)
        except (MillraceError, OSError) as error:
            known = of_system(error) or error
            reason = known.reason if isinstance(known, MillraceError) else "EVAL_FAILED"
            self._fail(step, f"failed: {known}", reason)
        aside = weights.with_name(f".{weights.name}.done")
        await asyncio.to_thread(weights.rename, aside)  # at once: a kill must not leave a part of them due
        await asyncio.to_thread(remove, aside, what="weights that were evaluated")

    def _prepare(self, weights: Path) -> PreparedEval:
        """Return the evaluation of one directory of weights, by the fine-tuning's settings.

        It continues an interrupted one.
        """
        step, settings = _step_of(weights), self._evaluation
        due = settings.due(step, is_last=weights.name.startswith("last-"))
        config = EvalRunConfig.model_validate(
            {
                "model": {"name": str(weights)},
                "env": [env.model_dump(exclude={"interval"}) for env in due],
                "sampling": settings.sampling.model_dump(),
                "output_dir": str(self._root),
                "log": self._config.log.model_dump(),
                **{name: getattr(settings, name) for name in ("num_examples", "rollouts_per_example")},
                **{name: getattr(settings, name) for name in ("max_concurrent", "rollout_timeout_s")},
            }
        )
        return PreparedEval(
            config=config,
            settings=Settings(),
            server=None,
            server_origin="",
            name=f"step-{step}",
            is_dry_run=False,
            is_plain=True,
            is_resumed=True,
            part_of=self._directory.name,
            inference=self._engine.inference,
            gpus=self._engine.gpus,
        )

    def _write_line(self, step: int, data: Mapping[str, Any]) -> None:
        """Append the figures of an evaluation to the run's metrics, unless the step has a line already.

        It is a single write, because the trainer appends to the same file.
        """
        path = self._directory / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.is_file() else []
        if any(_is_of(line, step) for line in lines):
            return
        with path.open("ab") as file:
            file.write(json.dumps({"step": step, **figures(data)}).encode() + b"\n")

    def _say(self, step: int, data: Mapping[str, Any]) -> None:
        """Print a line with reward, rollouts and time for each environment of a finished evaluation."""
        for env, found in data["envs"].items():
            failed = f", {found['num_failed']} failed" if found["num_failed"] else ""
            total = found["num_rollouts"] + found["num_failed"]
            text = f"eval {env}  step {step}  reward {found['reward_mean']:.3f}  ({total} rollouts{failed}, "
            click.echo(printable(f"{text}{found['seconds']:.1f}s)"), err=True)

    def _fail(self, step: int, why: str, reason: str, *, place: str | None = None) -> None:
        """Print a warning that the evaluation of a step has failed, and keep it for the end of the command.

        `place` is where the cause is; None: the evaluation's log.
        """
        where = place or f"its log: {self._root / f'step-{step}.log'}"
        text = printable(f"the evaluation of step {step} {why} [{reason}]; {where}")
        self._failed.append(text)
        click.echo(f"warning: {text}", err=True)

    def _write_summary(self) -> dict[str, Any]:
        """Write the results and the plot of all evaluated steps, in the format of `millrace eval` for several policies.

        Return the results.
        """
        data: dict[str, Any] = {"name": self._directory.name, "policies": []}
        places = (
            [path for path in self._root.iterdir() if (path / RESULTS_NAME).is_file()] if self._root.is_dir() else []
        )
        for place in sorted(places, key=_step_of):
            found = decode_object((place / RESULTS_NAME).read_bytes(), what=str(place), reason="EVAL_RESULTS_CORRUPT")
            step = _step_of(place)
            data["policies"].append({"policy": f"step-{step}", "step": step, **found})
        if data["policies"]:
            (self._directory / RESULTS_NAME).write_text(json.dumps(data, indent=2) + "\n")
            write_eval_plot(data, self._directory / "eval.png")
        return data


@contextlib.asynccontextmanager
async def evaluating(
    config: SFTConfig, directory: Path, interrupts: Interrupts, *, engine: EvaluationEngine
) -> AsyncIterator["RunningEvaluations"]:
    """Evaluate due weights of the fine-tuning in `directory` in a task during the block, with `engine`.

    The task is cancelled at the end of the block. `config.eval` must be set.
    """
    assert config.eval is not None
    evaluations = Evaluations(config, config.eval, directory, engine)
    task = asyncio.create_task(evaluations.run(interrupts), name="evaluations")
    try:
        yield RunningEvaluations(evaluations, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class RunningEvaluations:
    """Evaluations, and the task that runs them."""

    evaluations: Evaluations
    task: "asyncio.Task[None]"

    async def finish(self) -> None:
        """Wait for the evaluations that are left, then write and print the summary."""
        await self.evaluations.finish(self.task)


def _step_of(path: Path) -> int:
    """Return the step in the name of a directory: the number after its last dash."""
    return int(path.name.rpartition("-")[2])


def _is_of(line: bytes, step: int) -> bool:
    """Return whether a line of `metrics.jsonl` has evaluation figures of this step."""
    with contextlib.suppress(MillraceError):
        found = decode_object(line, what="a line of metrics.jsonl", reason="METRICS_CORRUPT")
        return found.get("step") == step and any(name.startswith("eval/") for name in found)
    return False
