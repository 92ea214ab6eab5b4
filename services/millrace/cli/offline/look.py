"""A run as commands look at it: its state, config and metrics, from a server or from a directory of results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.cli.offline.log_here import LogHere
    from millrace.client import Client

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLook:
    """What is known of a run at one moment."""

    name: str
    uid: str
    kind: str
    state: str
    config: Mapping[str, Any]
    metrics: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns by name, with `step`; None is a value that is not there."""

    def points(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, where it has one."""
        values = self.metrics.get(metric, ())
        steps = self.metrics.get("step", ())
        return [(step, value) for step, value in zip(steps, values, strict=False) if value is not None]

    @property
    def num_steps(self) -> int:
        """Steps that are done."""
        done = self.points("reward/mean")
        return done[-1][0] + 1 if done else 0


def looks_here(names: Sequence[str], *, store: str | None, prefix: str | None, note: Note) -> dict[str, RunLook]:
    """Those of the named runs that are read without a server, by what they were called: all of a store, if one is
    named, else those with a directory of results."""
    from millrace.cli.offline.run_store import directory_of, find_uid, store_of, store_prefix

    found: dict[str, RunLook] = {}
    for name in names:
        if store is None and directory_of(name) is None:
            continue
        from millrace.cli.offline.log_here import open_log  # the client alone has no numpy

        objects, meant = store_of(name, store)
        deployment = store_prefix(prefix)
        with open_log(objects, deployment, find_uid(objects, deployment, meant), note=note) as log:
            found[name] = _look(log)
    return found


async def looks_there(client: "Client", names: Sequence[str], *, note: Note) -> dict[str, RunLook]:
    """The named runs of a server."""
    from millrace.cli.names import resolve
    from millrace.decoding import decode_object
    from millrace.runlog.events.run_status import state_name
    from millrace.v1 import run_pb2

    found: dict[str, RunLook] = {}
    for name in names:
        run = await resolve(client.runs, name)
        found[name] = RunLook(
            name=run.name.removeprefix("runs/"),
            uid=run.uid,
            kind=run_pb2.RunKind.Name(run.kind).removeprefix("RUN_KIND_"),
            state=state_name(run.state),
            config=decode_object(run.config_json or "{}", what=f"the config of {run.name}", reason="CONFIG_UNREADABLE"),
            metrics=await client.runs.metrics(run.name, on_note=note),
        )
    return found


def _look(log: "LogHere") -> RunLook:
    from millrace.client.runs import metric_columns
    from millrace.readers.dashboard.answers import metrics_page

    steps: list[Any] = []
    first: int | None = 0
    while first is not None:
        said = log.ask("list-metrics", {"first": str(first)})
        steps.extend(metrics_page(said).steps)
        first = said["next"]
    changes = log.ask("events", {"kinds": "state_changed", "size": "1"})["events"]
    state = str(changes[0]["body"].get("new_state", "")) if changes else ""
    return RunLook(
        name=log.record.name,
        uid=log.record.uid,
        kind=log.record.kind,
        state=state.removeprefix("RUN_STATE_") or "–",
        config=log.record.config or {},
        metrics=metric_columns(steps),
    )
