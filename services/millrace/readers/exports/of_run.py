"""The exports of a run that its orchestrator keeps going: to W&B, and of traces to an OpenTelemetry collector."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from millrace.readers.exports.keeper import WANDB, Destination, Exporter
from millrace.runlog.records.run_record import RunRecord
from millrace.storage.scratch import scratch_parent

TRACES = Destination(
    module="millrace.readers.exports.traces",
    name="the collector of traces",
    reasons="TRACES",
    rest="nothing: the traces of the last steps are lost",
    finish_s=30.0,
)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class RunExports:
    """What is exported of one run under one claim, as its config and the environment say."""

    def __init__(
        self, record: RunRecord, *, store_url: str, prefix: str, warn: Callable[[str, str], Awaitable[object]]
    ) -> None:
        """Start them; `warn` gets the reason and the text of what somebody has to change."""
        self._running: list[Exporter] = []
        self._order = {"store_url": store_url, "prefix": prefix, "uid": record.uid}
        self._warn = warn
        config = record.config or {}
        if config.get("wandb"):
            directory = _directory(config, record.name, record.uid)
            self._start(record.name, WANDB, config=config, directory=str(directory))
        if traces_wanted(os.environ):
            self._start(record.name, TRACES)

    def _start(self, run: str, destination: Destination, **order: Any) -> None:
        exporter = Exporter(run, destination, tell=self._warn)
        exporter.start(**self._order, **order)
        self._running.append(exporter)

    async def finish(self) -> None:
        """The run has ended: let the rest be written, for a while."""
        await asyncio.gather(*(exporter.finish() for exporter in self._running))

    async def close(self, *, has_ended: bool) -> None:
        """End the processes; where the run has ended, what a moment allows is written first."""
        await asyncio.gather(*(exporter.close(has_ended=has_ended) for exporter in self._running))


def traces_wanted(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for traces: an endpoint or an exporter is named, and nothing says no."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    return bool(exporter) or any(environ.get(name) for name in _ENDPOINTS)


def _directory(config: dict[str, Any], run: str, uid: str) -> Path:
    """Where W&B's own files go: WANDB_DIR, or beside the results of the run if they are on this machine."""
    results = Path(str(config.get("output_dir") or "outputs")) / run
    if "WANDB_DIR" not in os.environ and results.is_dir():
        return results
    return Path(os.environ.get("WANDB_DIR") or scratch_parent() / "wandb") / uid
