"""Supervised fine-tuning: the same micro-batches, loss, optimizer and gang as RL, without a log.

Writes `<output_dir>/<run name>/model` (Hugging Face format with the tokenizer) and `metrics.jsonl`, one line per step.
With `[ckpt]` it saves checkpoints beside them and continues from the newest one of the same config.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import nn

from millrace.config.section import run_hash
from millrace.config.sections.sft import SFTConfig
from millrace.config.sections.trainer import LossConfig
from millrace.policies.tensors import pack_safetensors
from millrace.rollouts.types import TrainSample
from millrace.runlog import ZERO_CHAIN_HASH, Names
from millrace.storage.local import LocalStore
from millrace.telemetry import logging
from millrace.trainer.checkpoint.checkpointer import Checkpointer, CheckpointStore
from millrace.trainer.checkpoint.resume import describe, resume
from millrace.trainer.gang.determinism import set_determinism
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch, plan_micro_batches
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.learner import state_tensors
from millrace.trainer.learning.loss import LossInputs, token_losses, total_loss
from millrace.trainer.learning.optimizer import PolicyOptimizer
from millrace.trainer.model.pretrained import (
    load_model,
    load_tokenizer,
    policy_files,
    policy_tensors,
    resolve_dtype,
    resolve_model_directory,
)
from millrace.trainer.sft.data import Order, RowEncoder, load_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTStep:
    """What a step reports: mean loss per completion token, and how it went."""

    step: int
    num_steps: int
    loss: float
    lr: float
    grad_norm: float
    was_skipped: bool
    num_tokens: int
    num_loss_tokens: int
    seconds: float

    def metrics(self) -> dict[str, float | int]:
        """The step as a line of `metrics.jsonl`, under prime-rl's names."""
        return {
            "step": self.step,
            "loss/mean": self.loss,
            "optim/lr": self.lr,
            "optim/grad_norm": self.grad_norm,
            "optim/skipped": int(self.was_skipped),
            "progress/tokens": self.num_tokens,
            "perf/throughput": self.num_tokens / self.seconds if self.seconds > 0 else 0.0,
            "time/step": self.seconds,
        }


def run_sft(config: SFTConfig, *, gang: Gang, on_step: Callable[[SFTStep], None]) -> Path:
    """Fine-tunes as the config says and returns the directory of the model. Every rank of a gang calls it.

    InvalidSpecError if no row that it would take has a completion token within `data.seq_len`.
    """
    set_determinism("auto", seed=config.seed, device=gang.device)
    output = Path(config.output_dir) / (config.run.name or "sft")
    directory = resolve_model_directory(config.model.name)
    rows = load_rows(config.data)
    encoder = RowEncoder(load_tokenizer(directory), seq_len=config.data.seq_len)
    order = Order(len(rows), batch_size=config.data.batch_size, shuffle=config.data.shuffle, seed=config.data.seed)
    max_steps = config.max_steps or order.steps_per_pass
    encoder.require_completion(rows[index] for index in order.first_pass(max_steps=max_steps))
    dtype = resolve_dtype(config.model.dtype, device=gang.device)
    model = gang.shard(load_model(directory), compute_dtype=dtype)
    optimizer = PolicyOptimizer(model, optim=config.optim, scheduler=config.scheduler, max_steps=max_steps)
    session = _Session(config, gang=gang, model=model, optimizer=optimizer, output=output)
    start = session.resume()
    counted = {start + 1, min(start + order.steps_per_pass, max_steps)}  # early, and when every row was seen
    with session.open_metrics(start) as metrics:
        for step in range(start, max_steps):
            samples = [sample for index in order.rows_of(step) if (sample := encoder.encode(rows[index])) is not None]
            report = session.step(step, samples, max_steps=max_steps)
            if gang.is_leader:
                metrics.write(json.dumps(report.metrics()) + "\n")
                metrics.flush()
                on_step(report)
                if step + 1 in counted:
                    encoder.warn_of_losses()
            session.maybe_save(step + 1, is_last=step + 1 == max_steps)
    publish = config.model.publish_dtype
    save_dtype = dtype if publish == "auto" else resolve_dtype(publish, device=gang.device)
    return save_model(model, source=directory, target=output / "model", dtype=save_dtype, gang=gang)


class _Session:
    """The state of one fine-tuning: model, optimizer, checkpoints."""

    def __init__(
        self, config: SFTConfig, *, gang: Gang, model: nn.Module, optimizer: PolicyOptimizer, output: Path
    ) -> None:
        self._config = config
        self._gang = gang
        self._model = model
        self._optimizer = optimizer
        self._output = output
        self._run_hash = run_hash(config.resolved_json())
        self._autocast_dtype = resolve_dtype(config.model.dtype, device=gang.device)
        output.mkdir(parents=True, exist_ok=True)
        self._checkpoints: CheckpointStore | None = None
        self._checkpointer: Checkpointer | None = None
        if config.ckpt is not None:
            # One name per config: checkpoints of another one do not fit and must not be continued.
            names = Names("sft", self._run_hash[:16])
            self._checkpoints = CheckpointStore(LocalStore(output / "checkpoints"), names, gang=gang)
            self._checkpointer = Checkpointer(
                self._checkpoints, config.ckpt, gang=gang, run_hash=self._run_hash, epoch=0, determinism="best_effort"
            )

    def resume(self) -> int:
        """Fill the state from the newest checkpoint of this config, if there is one; return the next step."""
        if self._checkpoints is None:
            return 0
        found = resume(
            self._checkpoints,
            self._model,
            self._optimizer,
            gang=self._gang,
            run_hash=self._run_hash,
            is_strict=False,
        )
        if found.damaged:
            logger.warning(f"damaged checkpoints are left aside: {describe(found)}; going on from {found.start}")
        return 0 if found.manifest is None else found.manifest.step

    def open_metrics(self, start: int) -> IO[str]:
        """`metrics.jsonl`, continued behind step `start`."""
        path = self._output / "metrics.jsonl" if self._gang.is_leader else Path(os.devnull)
        kept: list[str] = []
        if start and path.is_file():
            kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] < start]
        file = path.open("w", encoding="utf-8")
        file.writelines(line + "\n" for line in kept)
        return file

    def step(self, step: int, samples: Sequence[TrainSample], *, max_steps: int) -> SFTStep:
        """One optimizer step on the mean cross-entropy of the completion tokens."""
        began = time.monotonic()
        micro_batches = self._micro_batches(samples)
        counts = [float(sum(getattr(m, name) for m in micro_batches)) for name in ("num_tokens", "num_ce_tokens")]
        num_tokens, num_loss_tokens = (int(count) for count in self._gang.sum(counts))
        total = 0.0
        for micro_batch in micro_batches:
            autocast = self._autocast_dtype if self._gang.is_alone and self._autocast_dtype.itemsize < 4 else None
            logprobs_BT, _ = token_logprobs(self._model, micro_batch, autocast_dtype=autocast)
            losses = token_losses(LossInputs.of(micro_batch, logprobs_BT), LossConfig())
            loss = total_loss(losses, num_rl_tokens=0, num_ce_tokens=num_loss_tokens)
            (loss * self._gang.world_size).backward()  # FSDP averages over the ranks; this makes it a sum
            total += float(loss.detach())
        report = self._optimizer.step(step)
        if report.was_skipped:
            logger.warning("the gradient was not finite; the step changed nothing", extra={"step": step})
        return SFTStep(
            step=step,
            num_steps=max_steps,
            loss=self._gang.sum([total])[0],
            lr=report.lr,
            grad_norm=report.grad_norm,
            was_skipped=report.was_skipped,
            num_tokens=num_tokens,
            num_loss_tokens=num_loss_tokens,
            seconds=time.monotonic() - began,
        )

    def maybe_save(self, step: int, *, is_last: bool) -> None:
        """Save a checkpoint at the interval and at the end, if the config has checkpoints."""
        if self._checkpointer is not None and (is_last or self._checkpointer.is_due(step)):
            state = state_tensors(self._model, self._optimizer, gang=self._gang)
            self._checkpointer.save(state, step=step, lineage=0, chain_hash=ZERO_CHAIN_HASH)

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        plan = plan_micro_batches(
            [sample.num_tokens for sample in samples],
            max_tokens=self._config.micro_batch_tokens,
            world_size=self._gang.world_size,
        )
        return [
            build_micro_batch(
                [samples[index] for index in part], seq_len=self._config.data.seq_len, device=self._gang.device
            )
            for part in plan[self._gang.rank]
        ]


def save_model(model: nn.Module, *, source: Path, target: Path, dtype: Any, gang: Gang) -> Path:
    """Write the model with the small files of `source` as a Hugging Face directory, whole or not at all."""
    tensors = list(policy_tensors(model, dtype=dtype))  # gathering is collective
    if gang.is_leader:
        fresh = target.with_name(f".{target.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        data, _ = pack_safetensors(tensors)
        (fresh / "model.safetensors").write_bytes(data)
        for name, content in policy_files(source, dtype=dtype).items():
            (fresh / name).write_bytes(content)
        replace_directory(fresh, target)
    gang.barrier()
    return target


def replace_directory(fresh: Path, target: Path) -> None:
    """Put `fresh` in the place of `target`; the old one is deleted last, and stays if the new one cannot be moved."""
    aside = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    try:
        fresh.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
