"""Exports to files: JSON lines, Parquet, and the event files of TensorBoard."""

import contextlib
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.readers.exports.metrics import MetricRow, points
from millrace.readers.exports.process import import_extra
from millrace.readers.exports.samples import ExportedSample
from millrace.storage.clean_up import TEMPORARY, remove
from millrace.telemetry.logging import redact, secrets_of

_PARQUET_ROWS = 10_000


def export_files(
    form: str, directory: Path, rows: Iterable[MetricRow], samples: Iterable[ExportedSample] | None
) -> list[Path]:
    """Write the metrics, and the samples unless they are None, into a directory; return the files that were written.

    `form` is jsonl, parquet or tensorboard. InvalidStateError if the library for it is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    writer: Callable[[Path, Iterable[MetricRow], Iterable[ExportedSample] | None], list[Path]]
    writer = {"jsonl": _jsonl, "parquet": _parquet, "tensorboard": _tensorboard}[form]
    return writer(directory, rows, samples)


def redacted(samples: Iterable[ExportedSample]) -> Iterator[dict[str, Any]]:
    """Yield the columns of each sample, with secrets in texts masked.

    These are the values of this environment's secret variables, and what looks like a secret.
    """
    secrets = secrets_of(os.environ)
    for sample in samples:
        columns = sample.to_json()
        yield {
            name: redact(value, secrets=secrets) if isinstance(value, str) else value for name, value in columns.items()
        }


def _metric_lines(rows: Iterable[MetricRow]) -> Iterator[dict[str, Any]]:
    """Yield one line (metric, step, value) for each metric of each step."""
    for metric, step, value in points(rows):
        yield {"metric": metric, "step": step, "value": value}


def _jsonl(directory: Path, rows: Iterable[MetricRow], samples: Iterable[ExportedSample] | None) -> list[Path]:
    """Write metrics and samples as JSON lines; return the files."""
    written = [_write_lines(directory / "metrics.jsonl", _metric_lines(rows))]
    if samples is not None:
        written.append(_write_lines(directory / "samples.jsonl", redacted(samples)))
    return written


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write a file with one JSON object per line, and return its path.

    A number that JSON does not have (NaN, an infinity) becomes null.
    """
    with _replacing(path) as part, part.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps({name: _number(value) for name, value in line.items()}, allow_nan=False) + "\n")
    return path


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Provide a temporary path to write to; after the block its file gets the name `path`.

    If the block raises, the file is removed, so that an interrupted export leaves none.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        remove(part, what=TEMPORARY)


def _number(value: Any) -> Any:
    """Return a value as it is, but None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parquet(directory: Path, rows: Iterable[MetricRow], samples: Iterable[ExportedSample] | None) -> list[Path]:
    """Write metrics and samples as Parquet; return the files. InvalidStateError if pyarrow is not installed."""
    arrow = import_extra("pyarrow", extra="parquet")
    metrics = arrow.schema([("metric", arrow.string()), ("step", arrow.int64()), ("value", arrow.float64())])
    written = [_write_table(directory / "metrics.parquet", metrics, _metric_lines(rows))]
    if samples is not None:
        kinds = {"str": arrow.string(), "int": arrow.int64(), "float": arrow.float64(), "bool": arrow.bool_()}
        schema = arrow.schema([(name, kinds[kind]) for name, kind in _SAMPLE_COLUMNS.items()])
        flat = ({**columns, "metrics": json.dumps(columns["metrics"])} for columns in redacted(samples))
        written.append(_write_table(directory / "samples.parquet", schema, flat))
    return written


def _write_table(path: Path, schema: Any, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write lines as a Parquet file with this schema, and return its path."""
    arrow, parquet = import_extra("pyarrow", extra="parquet"), import_extra("pyarrow.parquet", extra="parquet")
    with _replacing(path) as part, parquet.ParquetWriter(part, schema) as writer:
        rows: list[Mapping[str, Any]] = []
        for line in lines:
            rows.append(line)
            if len(rows) == _PARQUET_ROWS:
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
                rows = []
        writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
    return path


_SAMPLE_COLUMNS = {
    "step": "int", "environment": "str", "purpose": "str", "evaluation": "str", "task_id": "str", "ordinal": "int",
    "member": "int", "attempt": "int", "status": "str", "error": "str", "prompt": "str", "completion": "str",
    "reward": "float", "advantage": "float", "version_min": "int", "version_max": "int", "tokens": "int",
    "sampled_tokens": "int", "turns": "int", "stop": "str", "truncated": "bool", "seconds": "float", "metrics": "str",
    "answer": "str", "info": "str",
}  # fmt: skip
"""Of `samples.parquet`; `metrics` is JSON."""


_EVENTS = ".millrace"
"""What the names of our event files end in; other files stay."""


def _scalar(metric: str, value: float) -> Any:
    """Return a point of a metric in TensorBoard's form, under the metric's own name.

    TensorBoard's writer would change the name: it makes `pass_2` of both `pass@2` and `pass^2`.
    """
    protocol: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
    metadata = protocol.SummaryMetadata(display_name=metric)
    return protocol.Summary(value=[protocol.Summary.Value(tag=metric, simple_value=value, metadata=metadata)])


def _tensorboard(directory: Path, rows: Iterable[MetricRow], samples: Iterable[ExportedSample] | None) -> list[Path]:
    """Write metrics and samples as an event file of TensorBoard, and remove those of earlier exports; return the files.

    InvalidStateError if tensorboardX is not installed.
    """
    board = import_extra("tensorboardX", extra="tensorboard")
    seen: set[tuple[str, int]] = set()
    # Listed before the new file is written, which has such a name, too.
    before = list(directory.glob(f"events.out.tfevents.*{_EVENTS}"))
    with board.SummaryWriter(str(directory), filename_suffix=f".{time.time_ns()}{_EVENTS}") as writer:
        for row in rows:
            for metric, step, value in points([row]):
                if (metric, step) not in seen:
                    seen.add((metric, step))
                    writer.file_writer.add_summary(_scalar(metric, value), step, row.time)
        for columns in redacted(samples or ()):
            place = f"samples/{columns['environment']}"
            writer.add_text(place, f"```json\n{json.dumps(columns, indent=2, default=str)}\n```", columns["step"])
    for path in before:  # TensorBoard reads every file that is there: each point would be there twice
        remove(path, what="earlier export")
    return sorted(directory.glob(f"events.out.tfevents.*{_EVENTS}"))
