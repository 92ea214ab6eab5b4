"""Files of rows of `millrace sft`, for the corpus."""

import gzip
import json
from collections.abc import Iterator

import pyarrow as pa
import zstandard
from pyarrow import parquet


def data_files() -> Iterator[tuple[str, bytes]]:
    """Yield (target, file contents): JSON lines, one JSON array, compressed ones, a table."""
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    rows = [{"prompt": "a", "completion": "b"}, {"messages": [call], "tools": [{"type": "function"}]}]
    lines, sink = "\n".join(map(json.dumps, rows)).encode(), pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist([rows[1]]), sink)
    yield from (("data_lines", json.dumps(document).encode()) for document in (*rows, rows))
    yield from (("data_file", data) for data in (lines, gzip.compress(lines, mtime=0), zstandard.compress(lines)))
    yield "data_file", sink.getvalue().to_pybytes()
