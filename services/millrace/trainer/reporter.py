"""The trainer's reports: after each step one event and one log line; checkpoints, warnings and others as events."""

import logging
import time
from collections import defaultdict
from dataclasses import dataclass

import torch

from millrace.internal.v1 import batch_pb2
from millrace.runlog.records.token_logs import StoredTokenLog
from millrace.trainer import meters
from millrace.trainer.checkpoint.resume import SavedCheckpoint
from millrace.trainer.learning.optimizer import OptimizerReport
from millrace.trainer.learning.packing import Utilization
from millrace.trainer.log.batches import Batch
from millrace.trainer.publish.publisher import PolicyLog
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

_TIMES = {
    "step": "time/step",
    "wait": "time/wait_for_batch",
    "load": "time/load_data",
    "forward_backward": "time/forward_backward",
    "publish": "time/broadcast_weights",
    "checkpoint": "time/save_ckpt",
}
"""prime-rl's names of the phases of a step, by ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of one step by phase. `devices_s` is the wait for devices; the wait for the batch is in the batch."""

    devices_s: float
    forward_backward_s: float
    publish_s: float
    checkpoint_s: float


def staleness(header: batch_pb2.BatchHeader) -> tuple[float, int]:
    """Return mean and maximum of the staleness of a batch's rollouts; both are 0 without samples.

    A rollout's staleness is the step minus the oldest policy version that sampled its tokens.
    """
    oldest: dict[tuple[int, int, int], int] = defaultdict(lambda: header.step)
    for entry in header.samples:
        rollout = (entry.ordinal, entry.member, entry.attempt)
        oldest[rollout] = min(oldest[rollout], entry.min_policy_version)
    ages = [header.step - version for version in oldest.values()]
    return (sum(ages) / len(ages), max(ages)) if ages else (0.0, 0)


def token_staleness(header: batch_pb2.BatchHeader) -> dict[str, float]:
    """Return the metrics `staleness/mean` and `staleness/max` of a batch, and the same by environment.

    Those of an environment are `staleness/ENV/mean` and `…/max`. A token's staleness is the step minus the policy
    version that sampled it. Samples without versions are left out.
    """
    known = [entry for entry in header.samples if entry.num_sampled_tokens and entry.HasField("mean_policy_version")]
    found = {}
    for scope, env in (("", None), *((f"/{name}", number) for number, name in enumerate(header.envs))):
        entries = [entry for entry in known if env in (None, entry.env)]
        if not entries:
            continue
        total = sum((header.step - entry.mean_policy_version) * entry.num_sampled_tokens for entry in entries)
        found[f"staleness{scope}/mean"] = total / sum(entry.num_sampled_tokens for entry in entries)
        found[f"staleness{scope}/max"] = float(header.step - min(entry.min_policy_version for entry in entries))
    return found


class Reporter:
    """Writes reports into the run's log; without a `log_client`, at ranks other than 0, it only logs some."""

    def __init__(
        self, log_client: PolicyLog | None, *, world_size: int, utilization: Utilization | None = None
    ) -> None:
        """Report to the run's log through `log_client`; None, as at ranks other than 0: only log warnings and a resume.

        `utilization` computes the MFU; None: it is unknown. `world_size` is the number of ranks.
        """
        self._log_client = log_client
        self._utilization = utilization
        self._world_size = world_size
        self._last = time.monotonic()

    def start(self) -> None:
        """Start the clock of the first step: `step_completed` measures from here."""
        self._last = time.monotonic()

    def step_completed(
        self, batch: Batch, *, metrics: dict[str, float], optimizer: OptimizerReport, phases: Phases
    ) -> None:
        """Write the event, the metrics and the log line of a finished step at rank 0.

        The step's time is counted from the last call of this method, or of `start` before the first one. Adds to
        `metrics`, in place, staleness, optimizer, throughput, times and memory. `phases` has seconds.
        """
        now = time.monotonic()
        step_s, self._last = now - self._last, now
        if self._log_client is None:
            return
        header = batch.header
        seconds = {
            "step": step_s,
            "wait": batch.wait_s + phases.devices_s,
            "load": batch.load_s,
            "forward_backward": phases.forward_backward_s,
            "publish": phases.publish_s,
            "checkpoint": phases.checkpoint_s,
        }
        meters.step_completed(seconds, num_tokens=header.num_tokens)
        throughput = header.num_tokens / step_s if step_s > 0 else 0.0
        metrics |= token_staleness(header) | {
            "optim/lr": optimizer.lr,
            "optim/grad_norm": optimizer.grad_norm,
            "optim/skipped": optimizer.num_skipped / optimizer.num_steps,
            "perf/throughput": throughput,
            "perf/throughput_per_gpu": throughput / self._world_size,
            **{_TIMES[phase]: time_s for phase, time_s in seconds.items()},
        }
        if self._utilization is not None:
            metrics["perf/mfu"] = self._utilization.mfu((each.length for each in header.samples), seconds=step_s)
        if torch.cuda.is_available():
            metrics["perf/peak_memory"] = torch.cuda.max_memory_allocated() / 2**30
        self._write(_completed(batch, metrics, step_s=step_s, wait_s=seconds["wait"]))
        logger.info(
            "step completed",
            extra={
                "step": header.step + 1,
                "reward": round(header.reward_mean, 4),
                "loss": round(metrics.get("loss/mean", 0.0), 5),
                "mismatch_kl": round(metrics.get("mismatch_kl/mean", 0.0), 7),
                "grad_norm": round(optimizer.grad_norm, 4),
                "tokens_per_s": round(throughput),
                "seconds": round(step_s, 3),
                "wait_s": round(seconds["wait"], 3),
            },
        )

    def resumed(self, body: event_pb2.TrainingResumed) -> None:
        """Log, and write the event, that a run continues from an earlier step; `body` says which and why."""
        logger.info("training goes on", extra={"step": body.step, "start": body.start, "why": body.reason})
        self._write(event_pb2.Event(training_resumed=body))

    def checkpoint_saved(self, saved: SavedCheckpoint) -> None:
        """Write the event of a checkpoint that is stored."""
        body = event_pb2.CheckpointSaved(
            step=saved.step, uri=saved.uri, size_bytes=saved.size_bytes, manifest_sha256=saved.manifest_sha256
        )
        self._write(event_pb2.Event(checkpoint_saved=body))

    def token_log_stored(self, stored: StoredTokenLog) -> None:
        """Write the event that the log-probs of a step are stored."""
        body = event_pb2.TokenLogStored(
            step=stored.step, key=stored.key, sha256=stored.sha256, size_bytes=stored.size_bytes
        )
        self._write(event_pb2.Event(token_log_stored=body))

    def score_completed(self, body: event_pb2.ScoreCompleted) -> None:
        """Write the event of how far the log-probs of trainer and engine agree on the final evaluation."""
        self._write(event_pb2.Event(score_completed=body))

    def warning(self, reason: str, message: str) -> None:
        """Log the warning `message`, and write its event, whose machine-readable code is `reason`."""
        logger.warning(message, extra={"reason": reason})
        self._write(event_pb2.Event(warning=event_pb2.Warning(reason=reason, message=message)))

    def _write(self, event: event_pb2.Event) -> None:
        """Write an event into the run's log; do nothing without a log."""
        if self._log_client is not None:
            self._log_client.write_event(event)


def _completed(batch: Batch, metrics: dict[str, float], *, step_s: float, wait_s: float) -> event_pb2.Event:
    """Make the event of a finished step; `wait_s` is how long the step waited for its batch and devices."""
    header = batch.header
    mean, largest = staleness(header)
    body = event_pb2.StepCompleted(
        step=header.step,
        reward_mean=header.reward_mean,
        staleness_mean=mean,
        staleness_max=largest,
        num_tokens=header.num_tokens,
        num_rollouts=header.num_rollouts,
        step_seconds=step_s,
        wait_seconds=wait_s,
        metrics=metrics,
        chain_hash=batch.chain_hash.hex(),
    )
    return event_pb2.Event(step_completed=body)
