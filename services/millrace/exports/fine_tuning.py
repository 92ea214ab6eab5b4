"""The process that writes a `millrace sft` run to W&B while it goes on, from its `metrics.jsonl`.

The n-th line is W&B's n-th row, so that a run that goes on from a checkpoint, and an exporter that is started again,
write each value once.
"""

from pathlib import Path
from typing import Any, NoReturn

from millrace.decoding import decode_object, require_integer, require_number
from millrace.errors import CorruptObjectError
from millrace.exports.live import open_run, read_key
from millrace.exports.metrics import MetricRow
from millrace.exports.process import RunExport, serve
from millrace.exports.wandb_run import WandbRun


class FineTuningExport(RunExport):
    """Writes the lines of a file as they come."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__()
        self._order = order
        self._path = Path(order["metrics"])
        self._run: WandbRun | None = None

    def look(self) -> bool:
        """Write the lines that are new; the parent says when the run has ended."""
        run = self._run = self._run or open_run(self, self._order, samples_of=lambda _: [])
        for row in read_rows(self._path)[self.rows :]:
            run.write(self.rows, row)
            self.rows += 1
        return False

    def finish(self) -> None:
        """Close the run in W&B."""
        if self._run is not None:
            self._run.finish()


def read_rows(path: Path) -> list[MetricRow]:
    """The whole lines of the file, up to the first that is damaged."""
    rows: list[MetricRow] = []
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return rows
    for line in lines:
        try:
            values = decode_object(line, what="a line of metrics.jsonl", reason="METRICS_CORRUPT")
            step = require_integer(values.pop("step", None), what="its step")
            found = {name: require_number(value, what=name) for name, value in values.items() if value is not None}
        except (CorruptObjectError, ValueError):
            return rows
        rows.append(MetricRow(key=f"line/{len(rows)}", step=step, time=0.0, values=found))
    return rows


def main() -> NoReturn:
    """Export the run that the first line of the standard input names; ends with its parent."""
    read_key()
    serve(FineTuningExport)


if __name__ == "__main__":
    main()
