"""`millrace run lineage` and `millrace run compare` on directories of results, as `millrace rl` writes them."""

import json
from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace.runlog.names import Deployment, Names
from millrace.storage.local import LocalStore
from millrace.v1 import event_pb2
from millrace_testing.dashboard import HOSTILE, SECRET, START, RunWriter
from millrace_testing.runlog.fake_runs import FakeRuns, serving

UID = "01a205f04e00c6b2d345401dca64"


def write_run(root: Path, name: str, uid: str, *, steps: int = 3, lr: float = 1e-5) -> RunWriter:
    """`outputs/NAME` with the store of a run."""
    store = LocalStore(root / "outputs" / name / "store")
    names = Names("millrace", uid)
    store.create(Deployment("millrace").name_object(name), uid.encode())
    config = {"max_steps": steps, "trainer": {"optim": {"lr": lr}}, "model": {"name": "m"}}
    record = {"uid": uid, "name": name, "kind": "RL", "config": config, "run_hash": "0" * 64}
    store.create(names.run_json, json.dumps(record).encode())
    writer = RunWriter(store=store, names=names)
    for step in range(steps):
        writer.step(step, [f"{HOSTILE[2]} {SECRET}"] if step == 1 else ())
    return writer


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with `outputs/letters-1`, in which commands run."""
    for variable in ("MILLRACE_STORE_URL", "MILLRACE_PREFIX", "MILLRACE_SERVER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MILLRACE_SCRATCH_DIR", str(tmp_path / "scratch"))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, "letters-1", UID)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["run", *argv]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_sample_leads_to_what_made_it_and_what_came_of_it(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "lineage", "letters-1", "--sample", "2-1").splitlines()
    assert lines[0].startswith("sample 2-1  letters  task 2.1  ok  reward 0.500  advantage +0.000  5 tokens")
    assert lines[lines.index("made by") + 1].startswith("  policy v1  3 tokens  published 2023-")
    assert "  step 3, batch 2: 4 rollouts, 3 trained on, mean reward 0.500" in lines
    assert lines[lines.index("which made") + 1].startswith("  policy v3  published")
    assert any(line.startswith("    made from   batch 0  millrace/runs/") for line in lines)
    untrained = shown(capsys, "lineage", "outputs/letters-1", "--sample", "2-3")
    assert "no policy: nothing of it was sampled" in untrained and "not trained on in" in untrained
    assert "which made" not in untrained


def test_a_version_leads_both_ways(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "lineage", "-", "--version", "1").splitlines()
    assert lines[0].startswith("  policy v1  published")
    assert lines[lines.index("made from") + 1].startswith("  step 1, batch 0: 4 rollouts, 3 trained on")
    assert lines[lines.index("sampled tokens of") + 1 :][:2] == [
        "  3 rollouts: 2-0, 2-1, 2-2", "  trained on in step 3",
    ]  # fmt: skip
    assert lines[lines.index("next") + 1].startswith("  policy v2")
    assert "  version 4 is not there" in shown(capsys, "lineage", "-", "--version", "3")
    assert "the start policy" in shown(capsys, "lineage", "-", "--version", "0")


def test_lineage_as_json_is_the_message_of_the_api(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "lineage", "letters-1", "--sample", "2-1", "--format", "json"))
    assert found["rollout"]["rollout"]["name"] == "runs/letters-1/rollouts/2-1"
    assert [each["version"] for each in found["rollout"]["madeBy"]] == ["1"]


def test_what_a_model_wrote_neither_steers_the_terminal_nor_shows_a_secret(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, "lineage", "letters-1", "--sample", "1-0")
    assert "\\u202e" in text and not {"\x1b", "\x07", "\u202e"} & set(text) and SECRET not in text


def test_ids_of_samples_are_those_of_lineage(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in shown(capsys, "samples", "letters-1", "-o", "json").splitlines()]
    for record in records:
        found = json.loads(shown(capsys, "lineage", "letters-1", "--sample", record["id"], "-o", "json"))
        rollout = found["rollout"]["rollout"]
        assert (int(rollout.get("ordinal", 0)), int(rollout.get("member", 0))) == (record["task"], record["member"])


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--sample", "2-17"), 3, ("batch 2 resolved 4 samples", "millrace run samples")),
        (("--sample", "50-1"), 3, ("no batch 50 is committed, the newest is 2", "run samples")),
        (("--sample", "abc"), 2, ("such as 12-3",)),
        (("--version", "40"), 3, ("no policy version 40", "from 0, the start policy, to 3")),
        ((), 2, ("one of --sample and --version", "run samples")),
        (("--sample", "1-0", "--version", "1"), 2, ("one of --sample and --version",)),
        (("--version", "1", "--store", "file:///x", "--server", "127.0.0.1:1"), 2, ("--store", "leave one out")),
    ],
)
def test_mistakes_have_a_cause_and_a_remedy(
    outputs: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    assert main(["run", "lineage", "letters-1", *argv]) == code
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_a_server_is_asked_where_there_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    servicer = FakeRuns()
    servicer.add("alpha")
    with serving(servicer) as address:
        monkeypatch.setenv("MILLRACE_SERVER", address)
        lines = shown(capsys, "lineage", "alpha", "--sample", "1-0").splitlines()
        assert lines[0].startswith("sample 1-0") and "  policy v1  3 tokens" in "\n".join(lines)
        assert main(["run", "lineage", "alpha", "--version", "9"]) == 3
    assert "no policy version 9" in capsys.readouterr().err


def saved(step: int) -> event_pb2.Event:
    return event_pb2.Event(checkpoint_saved=event_pb2.CheckpointSaved(step=step, uri=f"file:///c/{step}", size_bytes=7))


def test_the_checkpoint_is_the_newest_before_a_version(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = write_run(outputs, "saved-1", UID[:-1] + "5", steps=4)
    writer.archive((START + 50.0, saved(1)), (START + 51.0, saved(3)))
    text = shown(capsys, "lineage", "saved-1", "--sample", "3-0")
    at = [line.split() for line in text.splitlines() if line.strip().startswith("checkpoint")]
    assert [words[2] for words in at] == ["1", "3"], "that of v2, which sampled it, and of v4, which came of it"


def test_runs_are_compared_by_their_curves_and_configs(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(outputs, "letters-2", UID[:-1] + "5", steps=5, lr=3e-4)
    lines = shown(capsys, "compare", "letters-1", "outputs/letters-2").splitlines()
    rows = {line.split("  ")[0].strip(): line for line in lines if line}
    assert lines[0].split() == ["letters-1", "letters-2"] and rows["steps"].split() == ["steps", "3", "5"]
    assert rows["reward/mean"].split() == ["reward/mean", "0.5", "▁▃▅", "1", "▁▃▅▆█"], "on one scale"
    assert rows["trainer.optim.lr"].split() == ["trainer.optim.lr", "1e-05", "0.0003"]
    assert rows["max_steps"].split() == ["max_steps", "3", "5"] and "model.name" not in rows
    found = json.loads(shown(capsys, "compare", "letters-2", "letters-1", "-o", "json", "--metric", "loss/mean"))
    assert [run["name"] for run in found["runs"]] == ["letters-2", "letters-1"]
    assert found["runs"][1]["metrics"] == {"loss/mean": [[0, 0.5], [1, 0.25], [2, 0.5 / 3]]}
    assert found["config"]["trainer.optim.lr"] == [3e-4, 1e-5]


def test_a_directory_is_compared_with_a_run_of_a_server(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer = FakeRuns()
    servicer.add("alpha")
    with serving(servicer) as address:
        monkeypatch.setenv("MILLRACE_SERVER", address)
        lines = shown(capsys, "compare", "alpha", "letters-1").splitlines()
    rows = {line.split("  ")[0].strip(): line.split() for line in lines if line}
    assert lines[0].split() == ["alpha", "letters-1"] and rows["state"] == ["state", "RUNNING", "–"]
    assert rows["reward/mean"][1:] == ["0.75", "▁▃▆█", "0.5", "▁▃▆"] and rows["steps"] == ["steps", "4", "3"]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("letters-1",), 2, "two to 8 different runs (got 1)"),
        (("letters-1", "letters-1"), 2, "two to 8 different runs (got 1)"),
        (("letters-1", "copy", "--metric", "colour"), 2, "none of these runs has a metric 'colour'"),
        (("letters-1", "copy", "--store", "file:///x", "--server", "127.0.0.1:1"), 2, "leave one out"),
    ],
)
def test_what_compare_refuses(
    outputs: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], code: int, words: str
) -> None:
    write_run(outputs, "copy", UID[:-1] + "5")
    assert main(["run", "compare", *argv]) == code
    assert words in capsys.readouterr().err


def test_a_curve_that_is_not_finite_is_drawn_and_no_json_breaks(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = write_run(outputs, "broken", UID[:-1] + "5")
    done = event_pb2.StepCompleted(step=3, reward_mean=1.0, metrics={"loss/mean": float("nan")})
    writer.archive((START + 50.0, event_pb2.Event(step_completed=done)))
    text = shown(capsys, "compare", "letters-1", "broken")
    assert next(line for line in text.splitlines() if line.startswith("loss/mean")).endswith("nan       █▃▁!")
    found = json.loads(shown(capsys, "compare", "letters-1", "broken", "-o", "json"))
    assert found["runs"][1]["metrics"]["loss/mean"][-1] == [3, None]
