"""A run in W&B, read back from the files of its offline sessions."""

from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace.readers.exports.metrics import points, read_metrics
from millrace.runlog.names import Names
from millrace.v1 import event_pb2
from millrace_testing import wandb_files

pytestmark = [pytest.mark.computes, wandb_files.NEEDS_WANDB]

NAMES = Names("millrace", "01a205f04e00c6b2d345401dca64")
SECRETS = (b"mrt_0123456789abcdef0123", b"sk-abcdefgh12345", b"two words")
"""Of every completion, and of the config."""


def export(*more: str) -> None:
    assert main(["run", "export", "letters-1", "--to", "wandb", "--offline", "--out", "out", *more]) == 0


def test_every_value_is_there_with_its_step(stored_run) -> None:
    export()
    rows = wandb_files.history(Path("out"))
    found = {(name, row["step"]): value for row in rows for name, value in row.items()}
    expected = {(metric, step): value for metric, step, value in points(read_metrics(stored_run.store, NAMES))}
    assert len(rows) == 6, rows
    assert {key: found[key] for key in expected} == expected
    assert [row["_step"] for row in rows] == list(range(6))
    with_table = [row for row in rows if "samples" in row]
    assert [row["step"] for row in with_table] == [0, 2]  # log_extras.interval = 2
    table = wandb_files.table(Path("out"), with_table[1]["samples"])
    first = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (first["prompt"], first["reward"], first["advantage"]) == ("user: task 2", 0.0, -0.5)
    assert first["completion"] == "<b>0</b> ***" and first["environment"] == "letters" and first["version"] == 2


def test_no_secret_stands_in_any_file(stored_run) -> None:
    """Not in the log of W&B, its tables, its config or what it notes beside them."""
    export()
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        data = path.read_bytes()
        assert not [secret for secret in SECRETS if secret in data], path


def test_the_run_is_that_of_its_config(stored_run) -> None:
    export("--entity", "team")
    (path,) = Path("out").glob("wandb/offline-run-*/run-*.wandb")
    found = next(record.run for record in wandb_files.records(path) if record.HasField("run"))
    assert (found.run_id, found.project, found.entity) == (NAMES.uid, "letters", "team")
    assert found.display_name == "letters-1" and list(found.tags) == ["a"]
    config = {item.key: item.value_json for item in found.config.update}
    assert "sk-abcdefgh12345" not in str(config) and config["max_steps"] == "3"


def test_exported_again_it_has_the_same_values_under_the_same_numbers(stored_run) -> None:
    export()
    before = wandb_files.history(Path("out"))
    stored_run.commit(3)
    stored_run.archive(*stored_run.step(3))
    export()
    rows = wandb_files.history(Path("out"))
    values: dict[int, set[tuple[str, float]]] = {}
    for row in rows:
        kept = {(name, value) for name, value in row.items() if name[0] != "_" and not isinstance(value, dict)}
        assert values.setdefault(row["_step"], kept) == kept
    assert len(before) == 6 and len(rows) == 14 and set(values) == set(range(8))


def test_why_a_reward_is_what_it_is_has_names_of_prime_rl(stored_run) -> None:
    found = {"metrics/letters/share": 0.5, "solve_all/all": 0.25, "stop_condition/letters/max_turns": 1.0}
    committed = event_pb2.BatchCommitted(step=3, num_trained=1, metrics=found)
    evaluated = event_pb2.EvalCompleted(env="letters", step=3, reward_mean=0.5, metrics={"pass@1": 0.5})
    stored_run.commit(3)
    stored_run.archive(event_pb2.Event(batch_committed=committed), event_pb2.Event(eval_completed=evaluated))
    export()
    rows = wandb_files.history(Path("out"))
    assert any(found.items() <= row.items() and row["step"] == 3 for row in rows)
    assert any(row.get("eval/letters/pass@1") == 0.5 for row in rows)


def test_a_damaged_archive_keeps_back_its_own_table_only(stored_run) -> None:
    (key,) = (info.key for info in stored_run.store.list(f"{NAMES.root}rollouts/00000002/"))
    stored_run.store.put(key, b"garbage")
    export()
    rows = wandb_files.history(Path("out"))
    assert [row["_step"] for row in rows] == list(range(6))
    assert [row["step"] for row in rows if "samples" in row] == [0]
    assert any(row["step"] == 2 and "reward/letters" in row for row in rows)
