"""What a replay found, as data and as lines for people. Free of torch: the command line imports it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor whose recomputed bits are not the published ones, or that only one of the two policies has."""

    name: str
    num_elements: int
    num_differing: int
    max_abs_difference: float
    missing_in: str = ""
    """ "published" or "recomputed" where the tensor (of that shape) is not there; empty where both have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The outcome of recomputing step `step` from version `start`; digests are of version `step + 1`, hex."""

    run_uid: str
    run_name: str
    step: int
    start: int
    computed_digest: str
    published_digest: str
    """Empty if that version was not published."""
    lineage: int
    differences: tuple[TensorDifference, ...]
    metrics: Mapping[str, float]
    other_loss: str = ""
    other_metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Why bits may differ although nothing is wrong: another torch, another number of ranks."""

    @property
    def is_equal(self) -> bool:
        """Return whether the recomputed version is the published one, bit for bit."""
        return self.published_digest == self.computed_digest

    @property
    def exit_code(self) -> int:
        """Return the command's exit code: 0 if the versions are equal, or none was published to compare with, else
        1.
        """
        return 0 if self.is_equal or not self.published_digest else 1


def report_lines(report: ReplayReport) -> list[str]:
    """Describe a replay in lines: the outcome, the tensors that differ, and the metrics of another loss."""
    version = report.step + 1
    lineage = f" (lineage {report.lineage})" if report.lineage else ""
    which = f"step {version} (batch {report.step}) of {report.run_name} ({report.run_uid})"
    first = f"recomputed {which} from version {report.start}"
    lines = [first, *(f"note: {note}" for note in report.notes)]
    if not report.published_digest:
        lines.append(f"version {version} is not published; recomputed digest {report.computed_digest}")
    elif report.is_equal:
        lines.append(f"equal: version {version}{lineage} has digest {report.computed_digest}")
    else:
        lines += [
            f"different: version {version}{lineage} was published with digest {report.published_digest}, "
            f"recomputed {report.computed_digest}",
            *_table([("TENSOR", "DIFFERING", "MAX ABS"), *map(_row, report.differences)]),
        ]
    if report.other_loss:
        lines += ["", *_metric_lines(report)]
    return lines


def _row(difference: TensorDifference) -> tuple[str, str, str]:
    """Return the table's cells for a tensor that differs: its name, how many elements differ, and the largest
    difference.

    Of a tensor that one side lacks, the second cell says which side.
    """
    if difference.missing_in:
        return difference.name, f"not {difference.missing_in}", "–"
    share = f"{difference.num_differing} of {difference.num_elements}"
    return difference.name, share, f"{difference.max_abs_difference:.3g}"


def _metric_lines(report: ReplayReport) -> list[str]:
    """Return the lines of a table with the step's metrics under the run's loss and under the other one."""
    names = sorted({*report.metrics, *report.other_metrics})
    rows = [(name, _number(report.metrics.get(name)), _number(report.other_metrics.get(name))) for name in names]
    return _table([(f"METRIC OF STEP {report.step + 1}", "THE RUN'S LOSS", report.other_loss), *rows])


def _number(value: float | None) -> str:
    """Return a number with six digits; a dash for None."""
    return "–" if value is None else f"{value:.6g}"


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return rows of three cells as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
