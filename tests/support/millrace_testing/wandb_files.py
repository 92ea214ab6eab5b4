"""Reads what an offline run of W&B has written: records in the blocks of a LevelDB log."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

NEEDS_WANDB = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs millrace[wandb]")
"""Of tests of wandb, which takes half a second to import: no process that only collects them does."""

_BLOCK = 32 * 1024
_HEADER = 7


def records(path: Path) -> list[Any]:
    """Return the records of one `run-*.wandb` file, as far as they are whole."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, part = path.read_bytes(), _HEADER, [], b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # no header fits in what is left of the block
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0 or at + _HEADER + length > len(data):
            break
        part += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(part))
            part = b""
    return found


def history(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of every attempt below a directory. Values that W&B has split into parts are one dict again."""
    rows = []
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records(path):
            if record.HasField("history"):
                row: dict[str, Any] = {}
                for item in record.history.item:
                    name, *part = [item.key] if item.key else item.nested_key
                    value = json.loads(item.value_json)
                    if part:
                        row.setdefault(name, {})["/".join(part)] = value
                    else:
                        row[name] = value
                rows.append(row)
    return rows


def table(directory: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Read the table that a row's value refers to: `columns` and `data`."""
    (path,) = directory.glob(f"wandb/offline-run-*/files/{value['path']}")
    return json.loads(path.read_text())
