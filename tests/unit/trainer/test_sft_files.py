"""Data files of SFT: each is read whole, or refused with the file, the row and what fixes it."""

import datetime
import gzip
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import ipc
from pyarrow import parquet as pq

from millrace.config.sections.data import DataSourceConfig
from millrace.errors import InvalidSpecError, InvalidStateError, MillraceError, NotFoundError
from millrace.trainer.sft import readers
from millrace.trainer.sft.rows import conversation_of, digest_rows, load_rows, load_sources

ROWS = [{"prompt": f"p{number}", "completion": f"c{number}"} for number in range(4)]
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, indent=2).encode()
BOM = b"\xef\xbb\xbf"


def gz(data: bytes) -> bytes:
    """Return packed with gzip, in every process alike: parameters of tests are part of their names."""
    return gzip.compress(data, mtime=0)


def table(rows: Any) -> pa.Table:
    return pa.Table.from_pylist(rows) if isinstance(rows, list) else pa.table(rows)


def parquet(rows: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table(rows), sink)
    return sink.getvalue().to_pybytes()


def arrow(rows: Any, *, is_stream: bool) -> bytes:
    sink = pa.BufferOutputStream()
    with (ipc.new_stream if is_stream else ipc.new_file)(sink, table(rows).schema) as writer:
        writer.write_table(table(rows))
    return sink.getvalue().to_pybytes()


def read(path: Path, **keys: Any) -> list[Mapping[str, Any]]:
    return load_rows(DataSourceConfig(name=str(path), **keys)).rows


@pytest.mark.parametrize(
    ("name", "data", "last"),
    [
        ("rows.jsonl", LINES, ":4"),
        ("rows.jsonl", LINES.rstrip(), ":4"),
        ("rows.jsonl", LINES.replace(b"\n", b"\r\n"), ":4"),
        ("rows.jsonl", b"\n\n" + LINES.replace(b"\n", b"\n  \n"), ":9"),
        ("rows.jsonl", BOM + LINES, ":4"),
        ("rows.jsonl", ARRAY, ", row 3"),
        ("rows.json", LINES, ":4"),
        ("rows.json", BOM + ARRAY, ", row 3"),
        ("rows.jsonl.gz", gz(LINES), ":4"),
        ("rows.jsonl.gz", gz(LINES[:77]) + gz(LINES[77:]), ":4"),
        ("rows.jsonl.gz", gz(LINES) + b"\0" * 512, ":4"),
        ("rows.json.gz", gz(ARRAY), ", row 3"),
        ("rows.json.zst", zstandard.compress(ARRAY), ", row 3"),
        ("rows.zst", zstandard.compress(LINES[:77]) + zstandard.compress(LINES[77:]), ":4"),
        ("said_to_be_plain.jsonl", gz(BOM + LINES), ":4"),
        ("rows.parquet", parquet(ROWS), ", row 3"),
        ("rows.data", parquet(ROWS), ", row 3"),
        ("rows.arrow", arrow(ROWS, is_stream=True), ", row 3"),
        ("rows.arrow", arrow(ROWS, is_stream=False), ", row 3"),
    ],
)
def test_a_file_is_read_as_what_it_is(tmp_path: Path, name: str, data: bytes, last: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    source = load_rows(DataSourceConfig(name=str(path)))
    assert source.rows == ROWS and source.place(3) == f"{path}{last}"


GZ = gz(LINES * 100)
SOME = parquet(ROWS)
BAD_TEXT = {"prompt": pa.array([b"ok", b"\xff"]).view(pa.string()), "completion": ["a", "b"]}


@pytest.mark.parametrize(
    ("name", "data", "where", "message", "remedy"),
    [
        ("cut.jsonl.gz", GZ[:-20], r":\d+", "cut off", "once more"),
        ("sum.jsonl.gz", GZ[:-8] + bytes(8), ":1", "damaged", "once more"),
        ("behind.jsonl.gz", GZ + b"garbage", ":401", "damaged", "once more"),
        ("cut.jsonl.zst", zstandard.compress(LINES)[:-9], ":1", "cut off", "once more"),
        ("none.jsonl.gz", b"", "", "no bytes", "once more"),
        ("cut.parquet", SOME[:-30], ", row 0", "cannot be read", "once more"),
        ("none.parquet", b"", ", row 0", "0 bytes", "once more"),
        ("text.parquet", parquet(BAD_TEXT), ", row 1", "utf-8", "once more"),
        ("lfs.parquet", b"version https://git-lfs.github.com/spec/v1\n", "", "pointer of Git LFS", "git lfs pull"),
        ("packed.parquet.gz", gz(SOME), "", "packed once more", "unpack it"),
        ("a.zip", b"PK\x03\x04....", "", "zip archive", "unpack it"),
        ("a.jsonl.xz", b"\xfd7zXZ\0", "", "packed with xz", "xzcat a.jsonl.xz"),
        ("a.csv", b"prompt,completion\n", "", "does not say what its columns hold", "to_json"),
        ("a.jsonl", LINES + '{"prompt": "é'.encode("latin-1"), ":5", "no UTF-8.*0xe9 in column 13", "iconv -f LATIN1"),
        ("a.json", ARRAY[:-2] + b', "\xe9"]', ", row 4", "no UTF-8", "iconv -f LATIN1"),
        ("a.jsonl", LINES.decode().encode("utf-16"), "", "UTF-16", "iconv -f UTF-16 "),
        ("a.jsonl", LINES.decode().encode("utf-16-be"), "", "UTF-16", "iconv -f UTF-16BE "),
        ("a.jsonl", LINES.decode().encode("utf-32"), "", "UTF-32", "iconv -f UTF-32 "),
        ("a.jsonl", LINES.decode().encode("utf-32-be"), "", "UTF-32", "iconv -f UTF-32BE "),
        ("a.json.gz", gz(LINES.decode().encode("utf-16")), "", "UTF-16", "iconv -f UTF-16 "),
        ("a.json", ARRAY[:-9], ", row 3", "is no JSON", "one JSON array"),
        ("a.json", ARRAY[:-1] + b",]", ", row 4", "is no JSON", "one JSON array"),
        ("a.json", b'{\n "prompt": "a"}', ":1", "is no JSON", "jq -c"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, data: bytes, where: str, message: str, remedy: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InvalidSpecError, match=message) as raised:
        read(path)
    assert raised.value.reason == "DATA_INVALID" and remedy in str(raised.value.remedy)
    assert re.fullmatch(re.escape(str(path)) + where, str(raised.value.violations[0].source))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (r'{"prompt": "\ud800", "completion": "x"}', "half of a surrogate pair"),
        ('{"prompt": "a\0", "completion": "x"}', "Invalid control character.* in column 14"),
        ('{"prompt": "a", "completion": "x", "score": NaN}', "NaN is no JSON"),
        ('{"prompt": "a", "completion": "x", "score": -Infinity}', "-Infinity is no JSON"),
        ('{"prompt": "a", "completion": "x", "score": 1e999}', "1e999 is no JSON"),
        ('{"prompt": "a", "completion": "x", "id": ' + "9" * 5000 + "}", "digits"),
        ('{"prompt": "a", "prompt": "b", "completion": "x"}', "key twice: 'prompt'"),
        ('{"prompt": "a", "completion": "x", "deep": ' + "[" * 9999 + "]" * 9999 + "}", "deeper than"),
        ("null", "null instead of"),
        ("[]", "a list instead of"),
        ("{'prompt': 'a'}", "is no JSON"),
        ('{"prompt": "a"}{"prompt": "b"}', "Extra data in column 16"),
        ('{"prompt": "a", "completion": null}', "it has `prompt`; null are `completion`"),
        ('{"prompt": "a", "completion": []}', "`prompt` is text, `completion` is a list"),
        ('{"messages": "hello"}', "`messages` is text that is no JSON"),
        ('{"messages": [{"from": "human", "value": "a"}]}', "has `from`, `value`; write `role` and `content`"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"`messages\[0\].content` is a number"),
        ('{"messages": [{"role": "assistant", "tool_calls": [3]}]}', r"`messages\[0\].tool_calls\[0\]` is no call"),
        ('{"messages": {"role": ["user"], "content": []}}', "different lengths"),
        ('{"messages": [], "tools": ["add"]}', r"`tools\[0\]` is text that is no JSON"),
    ],
)
@pytest.mark.parametrize(("begin", "between", "end", "where"), [("", "\n", "\n", ":3"), ("[", ", ", "]", ", row 2")])
def test_a_wrong_row_is_named(
    tmp_path: Path, row: str, message: str, begin: str, between: str, end: str, where: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(begin + between.join([*map(json.dumps, ROWS[:2]), row, json.dumps(ROWS[3])]) + end)
    with pytest.raises(InvalidSpecError, match=message) as raised:
        read(path)
    assert raised.value.violations[0].source == f"{path}{where}"


def test_a_row_says_which_columns_there_are_and_how_to_rename_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": 3, "question": "a", "answer": "b"}) + "\n")
    for name, data in (("rows.jsonl", path.read_bytes()), ("rows.parquet", parquet([{"id": 3, "question": "a"}]))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidSpecError, match=r"it has `id`, `question`.*data\.columns\.messages = \"id\""):
            read(tmp_path / name)
    columns = {"prompt": "question", "completion": "answer"}
    assert read(path, columns=columns) == [{"prompt": "a", "completion": "b"}]
    with pytest.raises(InvalidSpecError, match=r"val\.data\.columns\.messages"):
        load_sources(DataSourceConfig(name=str(path)), key="val.data")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_column_that_no_row_has_is_refused(tmp_path: Path, name: str) -> None:
    row = {"prompt": "a", "completion": "b"}
    data = parquet([row]) if name.endswith("parquet") else (json.dumps(row) + "\n").encode()
    (tmp_path / name).write_bytes(data)
    for columns in ({"messages": "chat"}, {"tools": "functions"}, {"prompt": "question"}):
        (column, given), *_ = columns.items()
        with pytest.raises(InvalidSpecError, match=rf'not what data\.columns\.{column} = "{given}" names') as raised:
            read(tmp_path / name, columns=columns)
        assert "leave these keys out" in str(raised.value.remedy)


def test_the_forms_in_which_tables_hold_conversations(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f"}}
    wanted = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
    columnar = {
        "role": [message["role"] for message in wanted],
        "content": [message["content"] for message in wanted],
        "tool_calls": [None, None, {name: [value] for name, value in call.items()}],
    }
    for messages, tools in (
        (wanted, [tool]),
        (json.dumps(wanted), json.dumps([tool])),
        (columnar, [json.dumps(tool)]),
        (wanted, {"type": ["function"], "function": [tool["function"]]}),
    ):
        path.write_bytes(parquet([{"messages": messages, "tools": tools, "extra": b"\xff"}]))
        (row,) = read(path)
        conversation = conversation_of(row)
        assert [message["role"] for message in conversation.messages] == ["user", "assistant", "assistant"]
        assert [message["content"] for message in conversation.messages] == ["q", "a", ""]
        assert conversation.messages[2]["tool_calls"][0]["function"]["name"] == "f"
        assert conversation.tools == [tool] and "extra" not in row


def test_what_json_has_not_is_text_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    at = datetime.datetime(2026, 1, 2)
    path.write_bytes(parquet([{"messages": [{"role": "user", "content": "a", "at": at}]}]))
    rows = read(path)
    assert rows[0]["messages"][0]["at"] == "2026-01-02T00:00:00" and digest_rows(rows)
    for value, message in ((b"\xff", "bytes"), (float("nan"), "nan")):
        path.write_bytes(parquet([{"messages": [{"role": "user", "content": "a", "extra": value}]}]))
        with pytest.raises(InvalidSpecError, match=rf"messages\[0\]\.extra` is .*{message}"):
            read(path)


def test_a_directory_is_read_in_the_order_of_its_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b/part.jsonl", "a.jsonl", "c.json", ".hidden.jsonl", "_tmp/x.jsonl", ".git/x.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"prompt": name, "completion": "x"}) + "\n")
    (tmp_path / "b" / "part.jsonl.gz").write_bytes(gz(b'{"prompt": "packed", "completion": "x"}'))
    (tmp_path / "b" / "part.parquet").write_bytes(parquet([{"prompt": "table", "completion": "x"}]))
    for name in ("README.md", "_SUCCESS", "LICENSE", "dataset_info.json", "more.csv"):
        (tmp_path / name).write_text("not a row")
    (tmp_path / "d.jsonl").write_text("\n")
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    assert [row["prompt"] for row in read(tmp_path)] == ["a.jsonl", "b/part.jsonl", "packed", "table", "c.json"]
    said = " ".join(caplog.messages)
    assert "not read, because of what their names end in: more.csv" in said and "d.jsonl: holds no rows" in said
    assert "several files are called part" in said and "README" not in said


def test_splits_are_shards_and_directories_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub, saved = tmp_path / "hub", tmp_path / "saved"
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        (hub / "data").mkdir(parents=True, exist_ok=True)
        (hub / "data" / f"{name}.parquet").write_bytes(parquet([{"prompt": name, "completion": "x"}]))
    assert [row["prompt"][:8] for row in read(hub, splits=["train"])] == ["train-00"] * 2
    assert not caplog.messages
    assert len(read(hub)) == 3 and "test is read beside train" in caplog.text
    for split in ("train", "test"):
        (saved / split).mkdir(parents=True)
        (saved / split / "data-00000-of-00001.arrow").write_bytes(arrow(ROWS, is_stream=True))
        (saved / split / "state.json").write_text("{}")
    assert read(saved, splits=["test"]) == ROWS
    shutil.copy(saved / "test/data-00000-of-00001.arrow", saved / "train.arrow")
    (saved / "train.jsonl").write_bytes(LINES)
    with pytest.raises(NotFoundError, match="several files called train"):
        read(saved, splits=["train"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "holds no rows, which end in .*; it is empty"),
        (lambda path: (path / "_delta_log").mkdir(parents=True), "Delta Lake"),
        (lambda path: (path.mkdir(), (path / "a.parquet").symlink_to("gone")), "a.parquet is a link to nothing"),
        (lambda path: path.write_text("\n \n"), "holds no rows"),
        (lambda path: path.write_text("[]"), "holds no rows"),
        (lambda path: path.symlink_to("/dev/null"), "neither a file nor a directory"),
        (lambda path: path.mkdir() or os.mkfifo(path / "a.jsonl"), "a.jsonl is neither a file nor a directory"),
    ],
)
def test_what_holds_no_rows_is_named(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "rows")
    with pytest.raises(NotFoundError, match=message) as raised:
        read(tmp_path / "rows")
    assert raised.value.reason == "DATA_NOT_FOUND"


@pytest.mark.parametrize("name", ["a\0.jsonl", "x" * 5000 + ".jsonl", "~nobody/rows.jsonl", "./rows"])
def test_a_path_that_cannot_be_is_named(name: str) -> None:
    with pytest.raises(NotFoundError, match="cannot be read"):
        load_rows(DataSourceConfig(name=name))


def test_an_id_of_the_hub_may_have_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*asked: Any, split: str) -> Any:
        raise RuntimeError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(NotFoundError, match=r"no file or directory owner/data-2\.5 in .*, and the Hub .* no network"):
        load_rows(DataSourceConfig(name="owner/data-2.5"))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(parquet(ROWS))

    def import_module(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(readers.importlib, "import_module", import_module)
    with pytest.raises(InvalidStateError, match="millrace\\[parquet\\]"):
        read(tmp_path / "rows.parquet")


def test_only_the_first_rows_are_read_where_only_these_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES + b"{")
    (source,) = load_sources(DataSourceConfig(name=str(path)), most=4)
    assert len(source.rows) == 4
    with pytest.raises(MillraceError):
        load_sources(DataSourceConfig(name=str(path)), most=5)
