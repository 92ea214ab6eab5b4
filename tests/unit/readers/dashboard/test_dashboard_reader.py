"""Indexes and views without a server: what is damaged, what is away, and why a step is slow."""

import json
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from millrace.cli.view.progress import Progress
from millrace.errors import InvalidSpecError, MillraceError, NotFoundError, UnavailableError
from millrace.orchestrator.catalog import ConfigText
from millrace.readers.dashboard import index as columns_module
from millrace.readers.dashboard import query as build_module
from millrace.readers.dashboard import reader as reader_module
from millrace.readers.dashboard.answers import INDEX_GROWING, to_json
from millrace.readers.dashboard.index import ROW, Columns, IndexDirectory, Texts, packed
from millrace.readers.dashboard.reader import Reader
from millrace.readers.dashboard.views import facts as facts_module
from millrace.readers.dashboard.views.tokens import of_secrets, pieces_of
from millrace.readers.exports.conversation import content_of
from millrace.runlog.event_archive import decode_event, load_archived_events
from millrace.storage.base import revision_key
from millrace.storage.local import LocalStore
from millrace.telemetry.logging import masked
from millrace_testing.dashboard import NAMES, START, UID, RunWriter
from millrace_testing.full_disk import largest_file
from millrace_testing.polling import block_until


class SwitchedStore:
    """A store that can be away, or hang."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.is_away = False
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str):
        found = getattr(self._store, name)

        def asked(*args, **kwargs):
            self.gate.wait(60)
            if self.is_away:
                raise UnavailableError("the object store is away", reason="STORE_UNREACHABLE", remedy="wait")
            return found(*args, **kwargs)

        return asked


@pytest.fixture
def nothing_stays_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every page look at the store."""
    monkeypatch.setattr(build_module, "FRESH_S", 0.0)
    monkeypatch.setattr(facts_module, "FRESH_S", 0.0)


@pytest.fixture
def written(local_store: LocalStore) -> RunWriter:
    writer = RunWriter(store=local_store)
    for step in range(3):
        writer.step(step)
    return writer


def settled(reader: Reader, batches: int) -> dict:
    """Return a page of samples, once so many batches are indexed."""
    for _ in range(600):
        page = reader.ask("samples", UID, {})
        if page["index"]["batches"] >= batches and not page["index"]["is_growing"]:
            return page
        time.sleep(0.05)
    raise AssertionError(page["index"])


@pytest.mark.usefixtures("nothing_stays_fresh")
def test_new_batches_come_while_somebody_looks(written, tmp_path):
    reader = Reader(written.store, "millrace", tmp_path / "i")
    assert settled(reader, 3)["total"] == 12
    assert len(reader.ask("metrics", UID, {})["curves"]["reward/mean"]) == 3
    written.step(3)
    assert settled(reader, 4)["total"] == 16
    for _ in range(100):
        if len(reader.ask("metrics", UID, {})["curves"]["reward/mean"]) == 4:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the new step is not told")
    reader.close()


def test_the_group_of_an_evaluation_is_its_own_in_all_batches(written, tmp_path):
    """A batch may archive several evaluations, each with every task, and an evaluation may be in several batches."""
    for step, member in ((3, 0), (4, 1)):
        written.commit(step, more=[written.evaluated(version, member) for version in (2, 3)])
    reader = Reader(written.store, "millrace", tmp_path / "i")
    settled(reader, 5)
    shown = reader.ask("samples", UID, {"purpose": "eval"})
    assert shown["total"] == 4
    found = [reader.ask("sample", UID, {"id": each["id"]}) for each in shown["samples"]]
    for each in found:
        same = {other["id"] for other in found if other["eval_id"] == each["eval_id"]}
        assert len(same) == 2 and {member["id"] for member in each["group"]} == same
        assert [member["member"] for member in each["group"]] == [0, 1]
    reader.close()


def test_an_index_is_kept_and_nothing_is_read_twice(written, tmp_path):
    reader = Reader(written.store, "millrace", tmp_path / "i")
    before = settled(reader, 3)
    reader.close()
    for info in list(written.store.list(f"{NAMES.root}rollouts/")):
        written.store.delete(info.key)  # pruned
    again = Reader(written.store, "millrace", tmp_path / "i")
    assert settled(again, 3)["samples"] == before["samples"]
    again.close()


def test_an_index_that_is_damaged_or_cut_off_is_made_again(written, tmp_path):
    reader = Reader(written.store, "millrace", tmp_path / "i")
    before = settled(reader, 3)["samples"]
    reader.close()
    steps = next((tmp_path / "i").rglob("steps.jsonl"))
    whole = steps.read_bytes()
    rows = steps.with_name("rows.bin")
    for damaged in (whole[:-7], b"garbage\n" + whole, whole.replace(b'"first":4', b'"first":5'), b"", whole + b"{}\n"):
        steps.write_bytes(damaged)
        reader = Reader(written.store, "millrace", tmp_path / "i")
        assert settled(reader, 3)["samples"] == before
        reader.close()
    rows.write_bytes(rows.read_bytes()[:-1])
    reader = Reader(written.store, "millrace", tmp_path / "i")
    assert settled(reader, 3)["samples"] == before
    reader.close()


def test_rows_behind_the_last_committed_step_are_taken_back(written, tmp_path):
    reader = Reader(written.store, "millrace", tmp_path / "i")
    before = settled(reader, 3)["samples"]
    reader.close()
    for name in ("rows.bin", "texts.bin"):  # its writer was killed between the rows and their line
        path = next((tmp_path / "i").rglob(name))
        path.write_bytes(path.read_bytes() + b"x" * 100)
    written.step(3)
    reader = Reader(written.store, "millrace", tmp_path / "i")
    assert settled(reader, 4)["samples"][4:] == before
    reader.close()


def test_a_damaged_archive_hides_its_own_batch_only(written, tmp_path):
    key = next(info.key for info in written.store.list(f"{NAMES.root}rollouts/00000001/"))
    written.store.put(key, b"garbage")
    reader = Reader(written.store, "millrace", tmp_path / "i")
    page = settled(reader, 3)
    assert page["total"] == 8
    assert [each["step"] for each in page["index"]["unreadable"]] == [1]
    assert "archive" in page["index"]["unreadable"][0]["problem"]
    reader.close()


@pytest.mark.usefixtures("nothing_stays_fresh")
def test_a_batch_that_is_repaired_can_be_read(written, tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "LOOK_AGAIN_S", 0.0)
    key = next(info.key for info in written.store.list(f"{NAMES.root}rollouts/00000001/"))
    whole = written.store.get(key)
    written.store.put(key, b"garbage")
    reader = Reader(written.store, "millrace", tmp_path / "i")
    assert settled(reader, 3)["index"]["num_unreadable"] == 1
    written.store.put(key, whole)
    block_until(lambda: settled(reader, 3)["index"]["num_unreadable"] == 0, timeout_s=30.0)
    assert settled(reader, 3)["total"] == 12
    reader.close()


@pytest.mark.usefixtures("nothing_stays_fresh")
def test_a_store_that_is_away_leaves_what_was_read(written, tmp_path):
    store = SwitchedStore(written.store)
    reader = Reader(store, "millrace", tmp_path / "i")  # type: ignore[arg-type]
    before = settled(reader, 3)
    reader.ask("metrics", UID, {})
    store.is_away = True
    for _ in range(200):
        page = reader.ask("samples", UID, {})
        assert page["samples"] == before["samples"]
        if "stale" in page:
            break
        time.sleep(0.05)
    assert "away" in page["stale"]
    assert reader.ask("metrics", UID, {})["curves"]["reward/mean"]
    store.is_away = False
    for _ in range(200):
        if "stale" not in reader.ask("samples", UID, {}):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the store is back, and the page does not notice")
    reader.close()


@pytest.mark.usefixtures("nothing_stays_fresh")
def test_a_store_that_hangs_keeps_no_page_waiting(written, tmp_path):
    store = SwitchedStore(written.store)
    reader = Reader(store, "millrace", tmp_path / "i")  # type: ignore[arg-type]
    settled(reader, 3)
    reader.ask("timeline", UID, {})
    store.gate.clear()
    began = time.monotonic()
    for question in ("samples", "metrics", "events", "timeline"):
        assert reader.ask(question, UID, {})
    assert time.monotonic() - began < 10
    store.gate.set()
    reader.close()


@pytest.mark.parametrize(
    ("question", "params"), [("sample", {"id": "2-1"}), ("tokens", {"id": "2-1"}), ("lineage", {"sample": "2-1"})]
)
def test_a_link_to_a_sample_waits_for_its_batch_to_be_read(written, tmp_path, monkeypatch, question, params):
    """Who opens a run by such a link is the first who asks for its index."""
    store = SwitchedStore(written.store)
    store.gate.clear()
    reader = Reader(store, "millrace", tmp_path / "i")
    with (
        monkeypatch.context() as hurried,
        pytest.raises(UnavailableError, match="0 of 0 batches of the run are read") as raised,
    ):
        hurried.setattr(reader_module, "FIRST_WAIT_S", 0.1)
        reader.ask(question, UID, params)
    assert raised.value.reason == INDEX_GROWING
    store.gate.set()
    settled(reader, 3)
    assert reader.ask(question, UID, params)
    with pytest.raises(NotFoundError, match="no batch 7"):
        reader.ask("sample", UID, {"id": "7-1"})
    reader.close()


def test_a_list_has_no_gap(written, tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "FIRST_WAIT_S", 0.1)
    store = SwitchedStore(written.store)
    store.gate.clear()
    reader = Reader(store, "millrace", tmp_path / "i")  # type: ignore[arg-type]
    for question, params in {"list-rollouts": {}, "list-metrics": {}, "get-lineage": {"version": "1"}}.items():
        with pytest.raises(UnavailableError) as caught:
            reader.ask(question, UID, params)
        assert caught.value.reason == reader_module.INDEX_GROWING and caught.value.retry_after_s
    store.gate.set()
    settled(reader, 3)
    page = reader.ask("list-rollouts", UID, {"size": "5", "offset": "5", "sort": "step"})
    assert [each["id"] for each in page["samples"]] == ["1-1", "1-2", "1-3", "2-0", "2-1"]
    assert (page["rows"], page["total"]) == (12, 12)
    with pytest.raises(InvalidSpecError) as lost:
        reader.ask("list-rollouts", UID, {"rows": "13"})
    assert lost.value.reason == "PAGE_TOKEN_EXPIRED"
    reader.close()


def test_a_page_of_metrics_is_bounded_by_its_values(written, tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_VALUES", 3)
    reader = Reader(written.store, "millrace", tmp_path / "i")
    settled(reader, 3)
    steps, first = [], 0
    while first is not None:
        page = reader.ask("list-metrics", UID, {"first": str(first), "names": "reward/mean,loss/mean,nothing"})
        assert sum(len(values) for _, values in page["steps"]) <= 3
        steps += [step for step, _ in page["steps"]]
        first = page["next"]
    assert steps == [0, 1, 2]
    whole = reader.ask("list-metrics", UID, {"size": "1"})
    assert len(whole["steps"]) == 1 and len(whole["steps"][0][1]) > 3, "a step is never cut"
    reader.close()


def test_lineage_names_the_range_of_versions_where_the_archive_is_gone(written, tmp_path):
    written.commit(3)
    reader = Reader(written.store, "millrace", tmp_path / "i")
    settled(reader, 4)
    before = reader.ask("lineage", UID, {"sample": "2-1"})
    assert [(each["version"], each["tokens"]) for each in before["made_by"]] == [(1, 3)]
    reader.close()
    for info in list(written.store.list(f"{NAMES.root}rollouts/")):
        written.store.delete(info.key)  # pruned
    again = Reader(written.store, "millrace", tmp_path / "i")
    settled(again, 4)
    after = again.ask("lineage", UID, {"sample": "2-1"})
    assert [(each["version"], each["tokens"]) for each in after["made_by"]] == [(1, None)]
    assert (after["step"]["step"], after["step"]["is_done"]) == (2, True)
    assert not again.ask("lineage", UID, {"sample": "3-1"})["step"]["is_done"]
    again.close()


def test_two_processes_do_not_share_a_shelf(tmp_path):
    first, second = IndexDirectory.open(tmp_path), IndexDirectory.open(tmp_path)
    assert first.directory != second.directory
    first.close()
    third = IndexDirectory.open(tmp_path)
    assert third.directory == tmp_path / "00"
    for shelf in (second, third):
        shelf.close()


def test_the_oldest_indexes_go_first(tmp_path, monkeypatch):
    import os

    monkeypatch.setattr(columns_module, "MAX_RUNS", 3)
    shelf = IndexDirectory.open(tmp_path)
    for at in range(5):
        place = shelf.place(f"run-{at}")
        Columns(place)
        os.utime(place, (at + 1, at + 1))
    assert sorted(path.name for path in shelf.directory.iterdir() if path.is_dir()) == ["run-2", "run-3", "run-4"]
    Columns(shelf.place("run-5", in_use=["run-2"]))
    assert (shelf.directory / "run-2").is_dir(), "it is being looked at"
    shelf.close()


def test_nobody_else_on_the_machine_reads_an_index(tmp_path):
    shelf = IndexDirectory.open(tmp_path / "dashboard" / "p")
    assert shelf.directory.stat().st_mode & 0o077 == 0
    shelf.close()


def test_an_append_that_fails_half_way_leaves_no_rows_that_are_others(tmp_path):
    """It is done again, and its names are there after a start."""
    columns, rows = Columns(tmp_path / "run"), np.zeros(3, ROW)
    rows["step"], rows["env"] = 7, columns.names.number("env", "letters")
    with pytest.raises(MillraceError), largest_file(rows.nbytes + 50):  # it ends within the texts
        columns.append(step=7, revision=0, key="k", rows=rows, texts=packed(Texts("a", "b")) * 3)
    rows["step"] = 8
    columns.append(step=8, revision=0, key="k", rows=rows, texts=packed(Texts("c", "d")) * 3)
    for found in (columns, Columns(tmp_path / "run")):
        assert found.rows()["step"].tolist() == [8, 8, 8]
        assert list(found.texts([0, 2])) == [Texts("c", "d")] * 2
        assert found.names.name("env", 0) == "letters"


def test_a_run_whose_store_hangs_keeps_no_page_of_another_waiting(written, tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_OPEN", 1)
    monkeypatch.setattr(reader_module, "FIRST_WAIT_S", 0.1)
    store = SwitchedStore(written.store)
    reader = Reader(store, "millrace", tmp_path / "i")  # type: ignore[arg-type]
    store.gate.clear()
    began = time.monotonic()
    for uid in (UID, "1" * 28, "2" * 28):
        reader.ask("metrics", uid, {})
    assert time.monotonic() - began < 20
    store.gate.set()
    settled(reader, 3)
    reader.close()


@pytest.mark.parametrize(("most", "is_kept"), [(reader_module.MAX_OPEN_EVENTS, True), (0, False)])
def test_the_events_of_as_many_runs_as_have_room_are_kept(written, tmp_path, monkeypatch, most, is_kept):
    """A page that draws curves of many live runs does not read each from its beginning every time."""
    monkeypatch.setattr(reader_module, "MAX_OPEN_EVENTS", most)
    store = SwitchedStore(written.store)
    reader = Reader(store, "millrace", tmp_path / "i")  # type: ignore[arg-type]
    settled(reader, 3)
    assert reader.ask("metrics", UID, {})["names"]
    for number in range(20):
        reader.ask("metrics", f"{number:028}", {})
    store.is_away = True
    answer = reader.ask("metrics", UID, {})
    assert bool(answer["names"]) is is_kept
    reader.close()


def test_what_no_view_expects_is_said_and_keeps_the_others(written, tmp_path, monkeypatch):
    def broken(_):
        raise ZeroDivisionError

    monkeypatch.setattr(build_module, "messages_of", broken)
    reader = Reader(written.store, "millrace", tmp_path / "i")
    for _ in range(200):
        if "stale" in (page := reader.ask("samples", UID, {})):
            break
        time.sleep(0.05)
    assert "ZeroDivisionError" in page["stale"]
    reader.close()


def test_all_batches_that_cannot_be_read_are_counted(local_store, tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_UNREADABLE", 2)
    writer = RunWriter(store=local_store)
    for step in range(3):
        writer.step(step)
    for info in list(local_store.list(f"{NAMES.root}rollouts/")):
        local_store.delete(info.key)
    reader = Reader(local_store, "millrace", tmp_path / "i")
    index = settled(reader, 3)["index"]
    assert (index["num_unreadable"], [each["step"] for each in index["unreadable"]]) == (3, [1, 2])
    reader.close()


@pytest.mark.parametrize("calls", [5, "text", [7, "f(x)", {"function": "f"}, {"function": {"name": "g"}}], {"a": 1}])
def test_tool_calls_of_any_shape_have_a_text(calls):
    assert content_of({"content": "said", "tool_calls": calls}).startswith("said")


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        ({"env_seconds": 6.0, "model_seconds": 0.5, "wait_s": 6.0}, "environment"),
        ({"env_seconds": 0.2, "model_seconds": 6.0, "wait_s": 6.0}, "engine"),
        ({"publish_s": 6.0, "env_seconds": 0.2, "model_seconds": 0.5, "wait_s": 6.0}, "publish"),
        ({"update_s": 6.0, "env_seconds": 0.2, "model_seconds": 0.5, "wait_s": 6.0}, "update"),
        ({"trainer_s": 6.0, "wait_s": 0.5}, "trainer"),
        ({"wait_s": 6.0, "commit_s": 5.5}, "commit"),
        ({"trainer_s": 6.0, "wait_s": 0.5, "held_up": {"time/broadcast_weights": 5.0}}, "publish"),
        ({"trainer_s": 6.0, "wait_s": 0.5, "held_up": {"time/load_data": 5.0}}, "load"),
        ({"trainer_s": 6.0, "wait_s": 0.5, "held_up": {"time/save_ckpt": 5.0}}, "checkpoint"),
    ],
)
def test_the_timeline_names_what_is_slow(local_store, tmp_path, slow, cause):
    writer = RunWriter(store=local_store, **slow)
    for step in range(4):
        writer.step(step)
    reader = Reader(local_store, "millrace", tmp_path / "i")
    settled(reader, 4)
    found = reader.ask("timeline", UID, {"steps": "3"})
    assert found["shares"][0]["cause"] == cause
    assert math.isclose(sum(each["share"] for each in found["shares"]), 1, abs_tol=0.01)
    assert found["shares"][0]["text"] in found["words"][0]
    assert ("The trainer stood still" in " ".join(found["words"])) == ("held_up" in slow)
    assert {lane["group"] for lane in found["lanes"]} >= {"trainer", "publish", "inference", "env-server"}
    assert (found["first_step"], found["last_step"]) == (1, 3)
    reader.close()


def test_the_steps_that_a_resumed_trainer_repeats_count_once(local_store, tmp_path):
    writer = RunWriter(store=local_store)
    for step in range(5):
        writer.step(step)
    writer.clock, writer.trainer_s = START + 100, 9.0
    for step in range(2, 5):
        writer.events(step)
    reader = Reader(local_store, "millrace", tmp_path / "i")
    settled(reader, 5)
    found = reader.ask("timeline", UID, {"steps": "20"})
    assert (found["steps"], found["first_step"], found["last_step"]) == (5, 0, 4)
    assert math.isclose(sum(each["seconds"] for each in found["shares"]), 3.0, abs_tol=0.01), "of the first reports"
    work = [text for lane in found["lanes"] for kind, _, _, text in lane["spans"] if kind == "work"]
    assert work == [f"step {step}: forward and backward" for step in range(5)]
    progress = Progress(name="runs/x")
    for entry in load_archived_events(local_store, NAMES):
        progress.apply(decode_event(entry))
    assert [point.number for point in progress.steps] == [1, 2, 3, 4, 5], "and so says `millrace run watch`"
    reader.close()


def test_a_store_that_is_slow_everywhere_is_one_cause(local_store, tmp_path):
    held_up = {"time/broadcast_weights": 1.5, "time/load_data": 1.0, "time/save_ckpt": 1.5}
    writer = RunWriter(store=local_store, trainer_s=6.0, wait_s=2.0, commit_s=1.5, held_up=held_up)
    for step in range(4):
        writer.step(step)
    reader = Reader(local_store, "millrace", tmp_path / "i")
    settled(reader, 4)
    found = reader.ask("timeline", UID, {"steps": "3"})
    assert found["shares"][0]["cause"] == "trainer"  # 2 s, and no other cause alone is longer
    assert found["words"][0].startswith("Mostly, the object store is waited for: 69% of a step: ")
    assert "the trainer saves a checkpoint (19%)" in found["words"][0]
    reader.close()


def test_a_conversation_that_is_no_unicode_is_said_to_be_so(local_store, tmp_path):
    RunWriter(store=local_store).step(0, ["half a pair \ud83d, as JSON may hold it"])
    reader = Reader(local_store, "millrace", tmp_path / "i")
    settled(reader, 1)
    found = to_json(reader.ask("sample", UID, {"id": "0-0"}))
    assert b"not kept in a form that can be shown" in found and b"half a pair" not in found
    reader.close()


def test_a_timeline_without_steps_says_so(local_store, tmp_path):
    reader = Reader(local_store, "millrace", tmp_path / "i")
    assert reader.ask("timeline", UID, {})["words"] == ["No step is done yet."]
    reader.close()


def test_what_goes_out_is_json_that_no_text_breaks():
    value = {"a": "\ud800 <script> \u2028 \x00", "n": float("nan"), "i": float("inf"), "password": "x", "l": [1.5, "b"]}
    data = to_json(value, secrets=("b",))
    assert data.isascii() and b"<script>" in data and b"\\u2028" in data
    assert masked(value, ())["n"] is None and masked(value, ())["password"] == "***"
    assert len(masked("x" * (1 << 20), ())) < 300_000


def test_pieces_of_a_byte_level_and_of_a_sentencepiece_vocabulary():
    bytes_level = {
        "model": {"vocab": {"Ġthe": 0, "Ċ": 1, "é": 2, "Ã©": 3}}, "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 9, "content": "<|end|>"}],
    }  # fmt: skip
    assert pieces_of(bytes_level) == {0: " the", 1: "\n", 2: "\ufffd", 3: "é", 9: "<|end|>"}
    assert pieces_of({"model": {"vocab": [["▁the", -1.0], ["s", -2.0]]}}) == {0: " the", 1: "s"}
    for odd in ({}, {"model": 3}, {"model": {"vocab": 5}, "added_tokens": "x"}, {"model": {"vocab": {"a": "b"}}}):
        assert pieces_of(odd) == {}


@pytest.mark.parametrize(
    ("words", "is_found"),
    [
        ("", True), ("grpo", True), ("GRPO optim", True), ("lr=1e-5", True), ("optim.lr=0.00001", True),
        ("lr=1e-4", False), ("1e-5", True), ("id=reverse", True), ("env[0].id=text", True), ("grpo lr=2", False),
        ("max_steps=3", True), ("max_steps=30", False), ("shuffle=true", True), ("shuffle=1", False), ("=", True),
        ("hunter2", False), ("password", True), ("nothing", False),
    ],
)  # fmt: skip
def test_a_run_is_found_by_its_config_but_not_by_its_secrets(words, is_found):
    config = {
        "max_steps": 3, "trainer": {"optim": {"lr": 1e-5}},
        "orchestrator": {"algo": {"type": "grpo"}, "shuffle": True, "env": [{"id": "reverse-text", "seed": None}]},
        "client": {"password": "hunter2hunter2"},
    }  # fmt: skip
    assert ConfigText.of(config, secrets=()).matches(words) is is_found


@pytest.mark.parametrize(
    ("pieces", "hidden"),
    [
        (["my ", "pass", "word", " = ", "hun", "ter2", "hun", " ", "ok"], "hunter2hun"),
        (["key ", "plain", "look", "ing-42", "!", None, "."], "plainlooking-42"),
        (["mrt", "_0123456789", "abcdef", "0123", ", ", "x"], "mrt_0123456789abcdef0123"),
        (["redis://u:", "se", "cret", "@", "host"], "secret"),
        (["nothing", " to ", "hide", None], ""),
        ([], ""),
    ],
)
def test_a_secret_in_several_tokens_is_hidden_and_nothing_else(pieces, hidden):
    found = of_secrets(pieces, ("plainlooking-42",))
    assert "".join(piece or "" for piece, is_hidden in zip(pieces, found, strict=True) if is_hidden) == hidden


@pytest.mark.usefixtures("nothing_stays_fresh")
def test_revisions_of_a_step_are_indexed_beyond_the_ninth(written: RunWriter, tmp_path) -> None:
    """Their keys sort as text: the tenth is before the second."""
    reader = Reader(written.store, NAMES.prefix, tmp_path / "index")
    first = NAMES.batch_header(2)
    try:
        for number in range(1, 11):
            written.store.create(revision_key(first, number), written.store.get(first))
            assert settled(reader, 3 + number)["index"]["batches"] == 3 + number
    finally:
        reader.close()


def test_a_preview_shows_no_end_of_a_secret(local_store: LocalStore, tmp_path, monkeypatch) -> None:
    secret = "s3cr3t-" + "0123456789" * 4
    monkeypatch.setenv("MY_SECRET", secret)
    writer = RunWriter(store=local_store)
    rollout = writer.rollout
    asked = [{"role": "user", "content": f"{secret} {'y' * 380}"}, {"role": "assistant", "content": "no"}]
    monkeypatch.setattr(
        writer, "rollout", lambda *given: replace(rollout(*given), messages_json=json.dumps(asked)), raising=False
    )
    writer.step(0)
    reader = Reader(local_store, NAMES.prefix, tmp_path / "index")
    try:
        prompts = [each["prompt"] for each in settled(reader, 1)["samples"]]
        assert prompts and not any("6789" in prompt for prompt in prompts)
    finally:
        reader.close()


def test_a_text_is_found_within_a_field_and_never_across_two(tmp_path):
    """Fields of full length touch each other in the file, and rows do."""
    columns = Columns(tmp_path / "run")
    full = Texts("p" * 200 + "tail", "c" * 300, "a" * 100, "e" * 300)
    texts = [full, full, Texts("one two", "Three", "", "\u00c4\u00df"), Texts()]
    rows = np.zeros(len(texts), ROW)
    columns.append(step=0, revision=0, key="k", rows=rows, texts=b"".join(map(packed, texts)))
    every = np.arange(len(texts))
    for words, expected in {
        "ONE  two": [2], "three": [2], "pc": [], "ca": [], "ep": [], "ccc": [0, 1], "\u00c4\u00df": [2],
        "\u00e4": [], " ": [0, 1, 2, 3],
    }.items():  # fmt: skip
        assert columns.containing(words, every).tolist() == expected, words
    assert columns.containing("ccc", np.array([1, 3])).tolist() == [1]
    assert columns.containing("ccc", np.array([], np.int64)).tolist() == []
