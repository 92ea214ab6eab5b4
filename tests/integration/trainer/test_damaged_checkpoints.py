"""A damaged newest checkpoint is left aside for the one before, which makes the same policies; it stays as it is."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.config.sections.rl import RLConfig
from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.storage.base import with_checksum
from millrace_testing.lanes import one_by_default

Recorder = Any  # conftest.Recorder; tests are not importable from one another
MakeConfig = Callable[..., RLConfig]
Damage = Callable[[Recorder, str], None]


def _item(recorder: Recorder, manifest: str, name: str) -> Path:
    (item,) = [item for item in json.loads(recorder.store.get(manifest))["objects"] if item["name"] == name]
    return _path(recorder, item["key"])


def _path(recorder: Recorder, key: str) -> Path:
    return Path(recorder.store_url.removeprefix("file://")) / key


def _flip(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def _flip_lineage(recorder: Recorder, manifest: str) -> None:
    path = _path(recorder, manifest)
    _flip(path, path.read_bytes().index(b'"lineage":0') + len('"lineage":'))


def _other_index(recorder: Recorder, manifest: str) -> None:
    """An index that says other things than the files, with every hash redone."""

    def change(tensor: dict[str, Any]) -> None:
        tensor["pieces"][0][3] += 1

    _redo_index(recorder, manifest, change)


def _other(**fields: Any) -> Damage:
    """Return a manifest that says other things than it did, with its checksum redone."""

    def change(recorder: Recorder, manifest: str) -> None:
        raw = json.loads(recorder.store.get(manifest))
        recorder.store.put(manifest, with_checksum(raw | fields))

    return change


def _other_shape(recorder: Recorder, manifest: str) -> None:
    """An index whose first tensor has one dimension more, with every hash redone."""
    _redo_index(recorder, manifest, lambda tensor: tensor["shape"].append(1))


def _redo_index(recorder: Recorder, manifest: str, change: Callable[[dict[str, Any]], None]) -> None:
    raw = json.loads(recorder.store.get(manifest))
    (item,) = [item for item in raw["objects"] if item["name"] == "index.json"]
    index = json.loads(recorder.store.get(item["key"]))
    change(next(tensor for tensor in index["tensors"] if len(tensor["shape"]) > 1))
    data = json.dumps(index).encode()
    recorder.store.put(item["key"], data)
    item |= {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    recorder.store.put(manifest, with_checksum(raw))


DAMAGE: dict[str, Damage] = {
    "manifest of other conditions": _other(conditions={"torch": "0.1"}),
    "manifest of another config": _other(run_hash="00" * 32),
    "manifest of adapters on a base": _other(base_digest="another"),
    "index of other shapes": _other_shape,
    "file flipped": lambda recorder, manifest: _flip(_item(recorder, manifest, "rank-00000.bin")),
    "file missing": lambda recorder, manifest: _item(recorder, manifest, "rank-00000.bin").unlink(),
    "file truncated": lambda recorder, manifest: _item(recorder, manifest, "rank-00000.bin").write_bytes(b"x"),
    "index flipped": lambda recorder, manifest: _flip(_item(recorder, manifest, "index.json")),
    "index missing": lambda recorder, manifest: _item(recorder, manifest, "index.json").unlink(),
    "index of other files": _other_index,
    "manifest empty": lambda recorder, manifest: _path(recorder, manifest).write_bytes(b""),
    "manifest too deep": lambda recorder, manifest: _path(recorder, manifest).write_bytes(b'{"a":' * 100_000),
    "manifest with another lineage": _flip_lineage,
    "manifest of the step before": lambda recorder, manifest: _path(recorder, manifest).write_bytes(
        _path(recorder, manifest.replace("00000004", "00000002")).read_bytes()
    ),
}


@pytest.fixture(scope="module")
def unbroken() -> dict[int, str]:
    """Return digests of the versions of an undamaged training, once they are known: the batches of all runs are the
    same.
    """
    return {}


@pytest.mark.parametrize("name", one_by_default(DAMAGE))
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    recorder: Recorder, make_config: MakeConfig, name: str, unbroken: dict[int, str]
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=6, close=False)
    if not unbroken:
        recorder.train(stop_at=6)
        unbroken |= recorder.digests()
        recorder.forget_training()
    recorder.train(stop_at=4)
    manifest = f"{recorder.root}checkpoints/00000004/manifest.json"
    DAMAGE[name](recorder, manifest)
    before = {
        info.key: recorder.store.get(info.key) for info in recorder.store.list(f"{recorder.root}checkpoints/00000004/")
    }
    recorder.train(stop_at=6)
    (warning,) = _warnings(recorder)
    assert warning.startswith("checkpoint 4 cannot be used: checkpoint ")
    assert "00000004/" in warning or "checkpoint 4 of run" in warning or "do not fit the model" in warning
    assert warning.endswith("the run goes on from checkpoint 2")
    assert recorder.digests() == unbroken
    after = {key: recorder.store.get(key) for key in before}
    assert after == before, "what is damaged stays as it is"

    assert recorder.checkpoints() == [2, 4, 6]
    assert recorder.store.head(manifest.replace("manifest.json", "manifest.r1.json")) is not None, "written anew"
    for info in list(recorder.store.list(f"{recorder.root}checkpoints/00000006/")):
        recorder.store.delete(info.key)
    recorder.train(stop_at=6)
    assert len(_warnings(recorder)) == 1, "the new one is whole"
    assert recorder.digests() == unbroken


def test_where_no_checkpoint_fits_it_is_told_plainly(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=5, close=False)
    recorder.train(stop_at=4)
    for step in recorder.checkpoints():
        _other(conditions={"torch": "0.1"})(recorder, f"{recorder.root}checkpoints/{step:08d}/manifest.json")
    with pytest.raises(InvalidStateError, match=r"checkpoint 4 .*torch was 0\.1, is ") as raised:
        recorder.train(stop_at=5)
    assert raised.value.reason == "CHECKPOINT_CONDITIONS_DIFFER"
    assert _warnings(recorder) == [] and recorder.checkpoints() == [2, 4]


def _warnings(recorder: Recorder) -> list[str]:
    found = [event.warning for event in recorder.events() if event.HasField("warning")]
    return [warning.message for warning in found if warning.reason == "CHECKPOINT_DAMAGED"]


def _damage_all(recorder: Recorder) -> None:
    for step in recorder.checkpoints():
        _flip(_item(recorder, f"{recorder.root}checkpoints/{step:08d}/manifest.json", "rank-00000.bin"))


def test_without_a_whole_checkpoint_the_log_is_replayed_from_its_start(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=5, close=False)
    recorder.train(stop_at=4)
    _damage_all(recorder)
    digests = recorder.digests()
    recorder.train(stop_at=5)
    assert len(_warnings(recorder)) == 2 and all("the start of the run" in text for text in _warnings(recorder))
    assert digests.items() <= recorder.digests().items() and len(recorder.digests()) == 6


def test_without_a_whole_checkpoint_and_without_batches_the_run_fails_and_says_what_is_gone(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=4, close=False)
    recorder.train(stop_at=4)
    _damage_all(recorder)
    (chunk, *_) = [info.key for info in recorder.store.list(f"{recorder.root}batches/00000001/")]
    _path(recorder, chunk).unlink()
    with pytest.raises(CorruptObjectError) as raised:
        recorder.train(stop_at=4)
    assert raised.value.reason == "CHECKPOINTS_DAMAGED"
    message = str(raised.value)
    for words in ("from the start of the run", chunk, "checkpoint 4: ", "checkpoint 2: ", "`millrace run resume`"):
        assert words in message
    assert len(_warnings(recorder)) == 2
