"""`millrace run export`: each format is read back by a library that knows nothing of us."""

import json
import time
from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace.readers.exports.files import export_files
from millrace.readers.exports.metrics import MetricRow
from millrace.runlog.names import Names

NAMES = Names("millrace", "01a205f04e00c6b2d345401dca64")
SECRET = "mrt_0123456789abcdef0123"


def export(form: str, *more: str) -> Path:
    assert main(["run", "export", "letters-1", "--to", form, "--out", "out", *more]) == 0
    return Path("out")


def check_values(found: dict[tuple[str, int], float]) -> None:
    assert [found["reward/mean", step] for step in range(3)] == [0.0, 0.25, 0.5]
    assert found["loss/mean", 2] == pytest.approx(0.5 / 3) and found["reward/letters", 0] == 0.5


def test_json_lines(stored_run, capsys: pytest.CaptureFixture[str]) -> None:
    out = export("jsonl", "--samples")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    check_values({(line["metric"], line["step"]): line["value"] for line in lines})
    assert len({(line["metric"], line["step"]) for line in lines}) == len(lines)
    assert capsys.readouterr().out.startswith(f"{len(lines)} values of 6 facts\n")
    text = (out / "samples.jsonl").read_text()
    samples = [json.loads(line) for line in text.splitlines()]
    assert [each["advantage"] for each in samples] == [-0.5, 0.5] * 3 and samples[3]["completion"] == "<b>1</b> ***"
    assert SECRET not in text
    assert samples[2]["answer"] == "task 1, reversed" and json.loads(samples[2]["info"])["info"]["level"] == 1


def test_parquet(stored_run) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = export("parquet", "--samples")
    table = parquet.read_table(out / "metrics.parquet").to_pylist()
    check_values({(line["metric"], line["step"]): line["value"] for line in table})
    samples = parquet.read_table(out / "samples.parquet").to_pylist()
    assert len(samples) == 6 and samples[1]["advantage"] == 0.5 and samples[1]["version_max"] == 0
    assert all(SECRET not in each["completion"] + each["info"] for each in samples)
    lines = (export("jsonl", "--samples") / "samples.jsonl").read_text().splitlines()
    flat = [{**each, "metrics": json.dumps(each["metrics"])} for each in map(json.loads, lines)]
    assert samples == flat, "no column is left out"


def read_events(path: Path) -> tuple[dict[tuple[str, int], float], list[tuple[int, bytes]]]:
    """Return the points and the texts of an event file."""
    from tensorboardX.proto.event_pb2 import Event

    data, found, texts = path.read_bytes(), {}, []
    while data:  # a record: length u64, its crc, the event, its crc
        length = int.from_bytes(data[:8], "little")
        event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts += [(event.step, *value.tensor.string_val)]
            else:
                found[value.tag, event.step] = value.simple_value
    return found, texts


def test_tensorboard_keeps_names_apart_that_its_writer_makes_one(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="needs millrace[tensorboard]")
    values = {"eval/a/pass@2": 0.5, "eval/a/pass^2": 0.25, "eval/a b/x": 1.0, "/x": 2.0, "x": 3.0}
    row = MetricRow(key="eval/3", step=3, time=1.0, values=values)
    (path,) = export_files("tensorboard", tmp_path, [row], None)
    assert read_events(path)[0] == {(name, 3): value for name, value in values.items()}


def test_tensorboard(stored_run) -> None:
    pytest.importorskip("tensorboardX", reason="needs millrace[tensorboard]")
    out = export("tensorboard", "--samples")
    (path,) = out.glob("events.out.tfevents.*")
    found, texts = read_events(path)
    check_values(found)
    lines = map(json.loads, (export("jsonl") / "metrics.jsonl").read_text().splitlines())
    assert {tag for tag, _ in found} == {line["metric"] for line in lines}
    assert len(texts) == 6 and all(SECRET.encode() not in text[1] for text in texts)


def test_what_is_not_installed_is_named_with_the_pip_command(
    stored_run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib

    real = importlib.import_module

    def without(name: str, *more: object) -> object:
        if name == "tensorboardX":
            raise ImportError("No module named 'tensorboardX'")
        return real(name, *more)

    monkeypatch.setattr("millrace.readers.exports.process.importlib.import_module", without)
    assert main(["run", "export", "letters-1", "--to", "tensorboard"]) != 0
    said = capsys.readouterr().err
    assert "tensorboardX" in said and "pip install 'millrace[tensorboard]'" in said


def test_an_export_that_breaks_off_leaves_no_file_that_looks_whole(stored_run) -> None:
    out = export("jsonl", "--samples")
    before = (out / "samples.jsonl").read_bytes()
    (key,) = (info.key for info in stored_run.store.list(f"{NAMES.root}rollouts/00000002/"))
    stored_run.store.put(key, b"garbage")
    assert main(["run", "export", "letters-1", "--to", "jsonl", "--out", "out", "--samples"]) != 0
    assert (out / "samples.jsonl").read_bytes() == before
    assert sorted(path.name for path in out.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_a_server_of_wandb_that_does_not_answer_is_named(
    stored_run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="needs millrace[wandb]")

    def refused(*_: object, **__: object) -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setattr("wandb.init", refused)
    assert main(["run", "export", "letters-1", "--to", "wandb", "--out", "out"]) != 0
    said = capsys.readouterr().err
    assert "W&B cannot be reached: connection refused" in said and "WANDB_BASE_URL" in said


def test_a_second_export_to_tensorboard_takes_the_place_of_the_first(stored_run) -> None:
    """TensorBoard reads every event file of a directory, and would show each point twice."""
    pytest.importorskip("tensorboardX", reason="needs millrace[tensorboard]")
    out = export("tensorboard")
    (out / "events.out.tfevents.1.host").write_bytes(b"")  # of somebody else
    time.sleep(1.1)  # their names have the second
    export("tensorboard")
    assert len(list(out.glob("events.out.tfevents.*"))) == 2
