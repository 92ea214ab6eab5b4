"""`millrace run why`: the waits of every service, ordered into a chain that ends at what does not wait for anyone."""

from collections.abc import Sequence

from millrace.orchestrator.run_view import RunView
from millrace.orchestrator.workers import WorkerRegistry
from millrace.rpc.waits_wire import to_proto
from millrace.telemetry import waits
from millrace.v1 import event_pb2, run_pb2, run_service_pb2

CHAIN = ("trainer", "orchestrator", "env-server", "inference")
"""The order in which a step's work is waited for; a wait of an earlier service is explained by a later one's."""


def explain(view: RunView, registry: WorkerRegistry, *, owner: str) -> run_service_pb2.ExplainRunResponse:
    """Collect what the run's workers and this orchestrator wait for."""
    if view.is_terminal:
        state = run_pb2.RunState.Name(view.run.state).removeprefix("RUN_STATE_")
        return run_service_pb2.ExplainRunResponse(summary=f"run {view.record.name} has ended as {state}")
    found = to_proto(waits.snapshot(owner)) + registry.waits_of(view.record.uid)
    found.sort(key=lambda wait: -wait.age_seconds)
    return run_service_pb2.ExplainRunResponse(waits=found, summary=chain(found, view))


def chain(found: Sequence[event_pb2.Wait], view: RunView) -> str:
    """One line: the oldest wait of each service, from the trainer down."""
    if view.run.state == run_pb2.RUN_STATE_QUEUED:
        return "queued: no trainer worker is free (none registered, or all have runs)"
    parts = []
    for service in CHAIN:
        mine = [wait for wait in found if wait.owner.startswith(service)]
        if mine:
            oldest = max(mine, key=lambda wait: wait.age_seconds)
            parts.append(f"{oldest.owner} waits for {oldest.reason}, {oldest.age_seconds:.1f} s")
    return " ← ".join(parts) if parts else "nobody waits: every service of the run is working"
