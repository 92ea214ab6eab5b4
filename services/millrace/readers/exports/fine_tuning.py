"""The process that writes a `millrace sft` run to W&B while it goes on, from its `metrics.jsonl`.

Lines of evaluations come when later steps are under way, and a run that goes on from a checkpoint makes steps again. So
a row is known by what it is of, and the order in which rows went to W&B is kept in `wandb-rows.jsonl`: the n-th line of
it is W&B's n-th row, for every exporter that is started again.
"""

import re
from pathlib import Path
from typing import Any, NoReturn

from millrace.decoding import decode_object, require_integer, require_number
from millrace.errors import CorruptObjectError
from millrace.readers.exports.live import open_run, read_key
from millrace.readers.exports.metrics import MetricRow
from millrace.readers.exports.process import RunExport, serve
from millrace.readers.exports.wandb_run import WandbRun

ORDER = "wandb-rows.jsonl"
_EVALUATED = re.compile(r"eval/(.+)/reward/mean")


class FineTuningExport(RunExport):
    """Writes the lines of a file as they come."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Create the export of an order, which names the file of metrics and where in W&B they go."""
        super().__init__()
        self._order = order
        self._path = Path(order["metrics"])
        self._kept = self._path.with_name(ORDER)
        self._keys: set[str] = set()
        self._run: WandbRun | None = None

    def look(self) -> bool:
        """Write the new lines of the file to W&B; return False, as the parent says when the run has ended."""
        run = self._run = self._run or open_run(self, self._order, samples_of=lambda _: [])
        if not self._keys:
            self._write_kept(run)
        for line, row in read_lines(self._path):
            if row.key not in self._keys:
                # Before W&B gets the row: a row that W&B may have must keep its number.
                with self._kept.open("ab") as kept:
                    kept.write(line + b"\n")
                self._write(run, row)
        return False

    def _write_kept(self, run: WandbRun) -> None:
        """Write the rows of earlier exporters to W&B again, in their order: it has all or some of them, or is another
        run.

        A torn last line of the file is removed.
        """
        found = read_lines(self._kept)
        for _, row in found:
            self._write(run, row)
        if self._kept.exists():  # a kill may have torn its last line, which W&B has not seen
            fresh = self._kept.with_name(f".{ORDER}.new")
            fresh.write_bytes(b"".join(line + b"\n" for line, _ in found))
            fresh.replace(self._kept)

    def _write(self, run: WandbRun, row: MetricRow) -> None:
        """Write a row to the run in W&B, as the one after all that were written before."""
        self._keys.add(row.key)
        run.write(self.rows, row)
        self.rows += 1

    def finish(self) -> None:
        """Close the run in W&B; wait until everything is uploaded, or on disk."""
        if self._run is not None:
            self._run.finish()


def read_lines(path: Path) -> list[tuple[bytes, MetricRow]]:
    """Return the whole lines of a file of metrics, each with its row, up to the first that is damaged.

    Empty without a file.
    """
    found: list[tuple[bytes, MetricRow]] = []
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            metrics = decode_object(line, what="a line of metrics.jsonl", reason="METRICS_CORRUPT")
            step = require_integer(metrics.pop("step", None), what="its step")
            values = {name: require_number(value, what=name) for name, value in metrics.items() if value is not None}
        except (CorruptObjectError, ValueError):
            return found
        found.append((line, MetricRow(key=_key(step, metrics), step=step, time=0.0, values=values)))
    return found


def _key(step: int, metrics: dict[str, Any]) -> str:
    """Return the key of the row of a line with these metrics: a step's, a validation's, or that of evaluations."""
    envs = sorted(match[1] for name in metrics if (match := _EVALUATED.fullmatch(name)))
    if any(name.startswith("eval/") for name in metrics):
        return f"eval/{','.join(envs)}/{step}"
    return f"step/{step}" if "loss/mean" in metrics else f"validation/{step}"


def main() -> NoReturn:
    """Write the run that the first line of the standard input names to W&B; exit when the parent is gone."""
    read_key()
    serve(FineTuningExport)


if __name__ == "__main__":
    main()
