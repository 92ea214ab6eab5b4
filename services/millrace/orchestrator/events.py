"""The events that the orchestrator writes into a run's log, one method each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.custom_code import CustomCode
from millrace.orchestrator.play.failures import EnvCount
from millrace.orchestrator.play.pools import PoolSizes
from millrace.orchestrator.run_meters import RunMeters
from millrace.orchestrator.workers import WorkerRegistry
from millrace.rpc.worker import to_proto
from millrace.runlog import Epoch, EventWriter, Lease, RunLog
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.run_status import RunStatus
from millrace.telemetry.waits import Wait
from millrace.v1 import event_pb2, run_pb2


class RunEvents:
    """Writes typed events through an `EventWriter`, and counts them for Prometheus."""

    def __init__(self, writer: EventWriter, *, run: str = "") -> None:
        """Make a writer of the events of the run named `run`, whose state is queued at first."""
        self._writer = writer
        self.meters = RunMeters(run)
        self.state = run_pb2.RUN_STATE_QUEUED

    def resume(self, status: RunStatus) -> None:
        """Go on from what the run's events say so far, which another orchestrator may have written."""
        self.state = status.state
        self.meters.resume(status.batches.moved)

    @property
    def num_queued(self) -> int:
        """Return the number of events that are not in the log yet."""
        return self._writer.num_queued

    async def state_changed(
        self, state: run_pb2.RunState, reason: str, *, error: run_pb2.RunError | None = None, chain_hash: str = ""
    ) -> None:
        """Write the event that the run's state changes from the one written last to `state`, and count it for
        Prometheus.

        `reason` is in words, `error` why the run failed; `chain_hash` (hex) is for a terminal state.
        """
        body = event_pb2.StateChanged(
            old_state=self.state, new_state=state, reason=reason, error=error, chain_hash=chain_hash
        )
        self.state = state
        self.meters.state_changed(state, failed_in=error.component if error is not None else "")
        await self._writer.write(event_pb2.Event(state_changed=body))

    async def workers_assigned(self, *, trainer: int, replicas: int) -> None:
        """Write the event that the run has so many accelerators from now on: of its trainer and of its replicas."""
        body = event_pb2.WorkersAssigned(trainer_accelerators=trainer, replica_accelerators=replicas)
        await self._writer.write(event_pb2.Event(workers_assigned=body))

    async def batch_committed(
        self,
        *,
        step: int,
        num_trained: int,
        dropped: Mapping[str, int],
        filtered: Mapping[str, int],
        num_tokens: int,
        chain_hash: str,
        pools: PoolSizes | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write the event of the committed batch `step`, and count the batch for Prometheus.

        `num_trained` are groups, `dropped` groups by reason, `filtered` rollouts by the filter that found them,
        `num_tokens` all tokens of its samples. `chain_hash` (hex) is the chain's after the batch. `pools` is None
        unless tasks move between pools. `metrics` are those of the batch by name, None for none.
        """
        self.meters.batch_committed(num_trained=num_trained, dropped=dropped, filtered=filtered, num_tokens=num_tokens)
        if pools is not None:
            self.meters.tasks(pools)
        body = event_pb2.BatchCommitted(
            step=step,
            num_trained=num_trained,
            dropped=dropped,
            filtered=filtered,
            num_tokens=num_tokens,
            chain_hash=chain_hash,
            metrics=metrics,
        )
        if pools is not None:
            body.num_easy_tasks, body.num_normal_tasks = pools.easy, pools.normal
            body.num_hard_tasks = pools.hard
        await self._writer.write(event_pb2.Event(batch_committed=body))

    async def rollouts_failed(self, count: EnvCount) -> None:
        """Write the event with the counts of an environment's rollouts, of which some failed."""
        await self._writer.write(
            event_pb2.Event(
                rollouts_failed=event_pb2.RolloutsFailed(
                    environment=run_pb2.EnvRollouts(
                        env=count.env,
                        num_rollouts=count.num_rollouts,
                        num_failed=count.num_failed,
                        failed=count.failed,
                        num_recent=count.num_recent,
                        num_recent_failed=count.num_recent_failed,
                        first_error=count.first_error,
                        frames=count.frames,
                    ),
                    message=count.explain(),
                )
            )
        )

    async def policy_served(self, body: event_pb2.PolicyServed) -> None:
        """Write the event that a replica began to serve a version."""
        await self._writer.write(event_pb2.Event(policy_served=body))

    async def eval_completed(self, body: event_pb2.EvalCompleted) -> None:
        """Write the event of a finished evaluation, with its report."""
        await self._writer.write(event_pb2.Event(eval_completed=body))

    async def warning(self, reason: str, message: str) -> None:
        """Write the event of something that needs a person's attention.

        `reason` is UPPER_SNAKE, `message` a sentence.
        """
        await self._writer.write(event_pb2.Event(warning=event_pb2.Warning(reason=reason, message=message)))

    async def wait_reported(self, wait: Wait) -> None:
        """Write the event of a wait that holds the run up."""
        await self._writer.write(event_pb2.Event(wait_reported=event_pb2.WaitReported(wait=to_proto([wait])[0])))

    async def flush(self) -> None:
        """Wait until every queued event is in the log."""
        await self._writer.flush()

    async def close(self) -> None:
        """Write the queued events, and end the writer."""
        await self._writer.close()


def is_reported(count: int) -> bool:
    """Return whether the `count`-th occurrence (from 1) is reported: the first, second, fourth, eighth, … are."""
    return count & (count - 1) == 0


# What identifies one drive of a run, and what it works with: the same for all of its parts.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A claimed run: its record, its log under one epoch and lease, its events, the workers to choose from, and what
    of the user's code may be loaded for it."""

    record: RunRecord
    log: RunLog
    epoch: Epoch
    lease: Lease
    registry: WorkerRegistry
    events: RunEvents
    custom_code: CustomCode = field(default_factory=CustomCode)
