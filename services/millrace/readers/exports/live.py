"""The process that writes a run to W&B while it goes on.

Nothing is kept between two of them: the order of the rows follows from the log, and W&B says how many of them it has.
An offline session begins at the first row again, because nobody can tell what of the one before is on disk; the same
rows have the same numbers, so that `wandb sync` puts them in one place.
"""

import os
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from millrace.errors import MillraceError, PermissionDeniedError, UnavailableError
from millrace.readers.exports.metrics import MetricFollower, MetricRow
from millrace.readers.exports.process import LogExport, RunExport, serve
from millrace.readers.exports.samples import ExportedSample, read_samples
from millrace.readers.exports.wandb_run import SamplesOf, WandbRun, WandbTarget, target_of
from millrace.telemetry.logging import keep_secret

INIT_TIMEOUT_S = 60.0
KEY, KEY_FILE = "WANDB_API_KEY", "WANDB_API_KEY_FILE"
_URL = re.compile(r"https?://\S+|\b[\d.]+:\d+")
_REFUSED = re.compile(r"\b(401|403)\b|api key")


class LiveExport(LogExport):
    """Writes rows as they come."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Create the export of an order, which names the run, its store, and where in W&B it goes."""
        super().__init__(order)
        self._order = order
        self._follower = MetricFollower(self.store, self.names)
        self._pending: deque[MetricRow] = deque()
        self._run: WandbRun | None = None

    def look(self) -> bool:
        """Write the new rows of the log to W&B; return whether the log has the run's end.

        UnavailableError or PermissionDeniedError if W&B cannot be opened; any error of W&B after that ends the process.
        """
        run = self._run = self._run or open_run(self, self._order, samples_of=self._samples_of)
        self._pending.extend(self._follower.read())
        while self._pending:
            run.write(self.rows, self._pending[0])
            # Only now: after an error the next look begins with this row.
            self._pending.popleft()
            self.rows += 1
        return self._follower.terminal is not None

    def finish(self) -> None:
        """Close the run in W&B; wait until everything is uploaded, or on disk."""
        if self._run is not None:
            self._run.finish()

    def _samples_of(self, step: int) -> list[ExportedSample]:
        """Return the samples that a step's batch resolved."""
        return list(read_samples(self.store, self.names, step=step))


def open_run(export: RunExport, order: Mapping[str, Any], *, samples_of: SamplesOf) -> WandbRun:
    """Open the run that an export's order names in W&B, and report that to the parent; raise as `open_target` does.

    `samples_of` returns the samples of a step, for tables.
    """
    target = target_of(order["config"], uid=order["uid"], run=order["run"], directory=Path(order["directory"]))
    export.report("opening")
    run = open_target(target, samples_of=samples_of)
    export.report("open", text=f"row {run.next_row}")
    return run


def open_target(target: WandbTarget, *, samples_of: SamplesOf) -> WandbRun:
    """Open a run in W&B and return it; `samples_of` returns the samples of a step, for tables.

    PermissionDeniedError if W&B refuses it, UnavailableError for any other failure.
    """
    try:
        timeout_s = float(os.environ.get("WANDB_INIT_TIMEOUT") or INIT_TIMEOUT_S)
        return WandbRun(target, samples_of=samples_of, init_timeout_s=timeout_s)
    except MillraceError:
        raise
    except Exception as error:  # the edge to foreign code: whatever it raises, who asks may try again
        raise _as_millrace(error) from error


def _as_millrace(error: Exception) -> MillraceError:
    """Make our error of one that W&B's library raised: PermissionDeniedError for a refusal, else UnavailableError."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = _URL.sub("", str(error).lower())  # a port may look like a status
    if names & {"AuthenticationError", "UsageError"} or _REFUSED.search(text):
        return PermissionDeniedError(
            f"W&B refuses the run: {error}",
            reason="WANDB_REFUSED",
            remedy=f"see that {KEY} (or {KEY_FILE}) of the orchestrator is the key of somebody who may write there",
        )
    return UnavailableError(
        f"W&B cannot be reached: {error}",
        reason="WANDB_UNREACHABLE",
        remedy="see WANDB_BASE_URL and the network if it lasts; for a run that goes on it is tried again",
    )


def read_key() -> None:
    """Set WANDB_API_KEY from the file that WANDB_API_KEY_FILE names, if it does; the key is masked in logs."""
    if path := os.environ.get(KEY_FILE):
        os.environ[KEY] = Path(path).read_text().strip()
    if key := os.environ.get(KEY):
        keep_secret(key)


def main() -> NoReturn:
    """Write the run that the first line of the standard input names to W&B; exit when the parent is gone."""
    read_key()
    serve(LiveExport)


if __name__ == "__main__":
    main()
