"""A damaged policy is published anew by the trainer that has its weights; replicas find it, nothing is overwritten."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.config.sections.rl import RLConfig
from millrace.errors import CorruptObjectError, InvalidStateError, NotFoundError
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.policies.host_copy import HostCopy, read_manifest
from millrace_testing.lanes import one_by_default

Recorder = Any  # conftest.Recorder; tests are not importable from one another
MakeConfig = Callable[..., RLConfig]


def _path(recorder: Recorder, key: str) -> Path:
    return Path(recorder.store_url.removeprefix("file://")) / key


def _key(recorder: Recorder, version: int) -> str:
    return f"{recorder.root}policies/0000-{version:08d}/manifest.json"


def _object(recorder: Recorder, version: int, codec: str) -> Path:
    raw = json.loads(recorder.store.get(_key(recorder, version)))
    (encoding,) = [encoding for encoding in raw["encodings"] if encoding["codec"] == codec]
    return _path(recorder, encoding["objects"][0]["key"])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _stage(recorder: Recorder, version: int) -> str:
    """Return what a replica that has nothing puts together."""
    return HostCopy(recorder.store).stage(_key(recorder, version)).manifest.digest


DAMAGE: dict[str, Callable[[Recorder], None]] = {
    "anchor flipped": lambda recorder: _flip(_object(recorder, 0, "full")),
    "anchor missing": lambda recorder: _object(recorder, 0, "full").unlink(),
    "anchor cut": lambda recorder: _object(recorder, 0, "full").write_bytes(b"x"),
    "delta flipped": lambda recorder: _flip(_object(recorder, 2, "delta")),
    "manifest flipped": lambda recorder: _flip(_path(recorder, _key(recorder, 2))),
    "manifest of another version": lambda recorder: _path(recorder, _key(recorder, 2)).write_bytes(
        _path(recorder, _key(recorder, 1)).read_bytes()
    ),
    "manifest with other spaces": lambda recorder: _path(recorder, _key(recorder, 2)).write_text(
        json.dumps(json.loads(recorder.store.get(_key(recorder, 2))), indent=1)
    ),
    "manifest of the anchor missing": lambda recorder: _path(recorder, _key(recorder, 0)).unlink(),
}


@pytest.fixture
def config(make_config: MakeConfig) -> RLConfig:
    return make_config(
        optim={"lr": 1e-6}, policy={"anchor_interval": 100}, model={"seq_len": 32, "publish_dtype": "bfloat16"}
    )


def _entry(recorder: Recorder, version: int) -> PolicyEntry:
    raw = json.loads(recorder.store.get(_key(recorder, version)))
    sha256 = hashlib.sha256(recorder.store.get(_key(recorder, version))).digest()
    return PolicyEntry(
        lineage=0,
        version=version,
        manifest_key=_key(recorder, version),
        manifest_sha256=sha256,
        digest=raw["digest"],
    )


@pytest.mark.parametrize("name", one_by_default(DAMAGE))
def test_a_damaged_policy_is_published_anew(recorder: Recorder, config: RLConfig, name: str) -> None:
    recorder.record(config, steps=2, close=False)
    state: dict[str, Any] = {}

    def report() -> tuple[PolicyEntry, int] | None:
        """As soon as version 2 is there: it is damaged, a replica cannot read it, and says so again and again."""
        if "before" not in state:
            if 2 not in recorder.digests():
                return None
            state["entry"] = _entry(recorder, 2)
            assert _stage(recorder, 2) == state["entry"].digest
            DAMAGE[name](recorder)
            state["before"] = {
                info.key: recorder.store.get(info.key) for info in recorder.store.list(recorder.root + "policies/")
            }
            with pytest.raises((CorruptObjectError, NotFoundError)):
                HostCopy(recorder.store).stage(_key(recorder, 2), state["entry"].manifest_sha256)
        state["count"] = state.get("count", 0) + 1
        return state["entry"], state["count"]

    successor = _key(recorder, 2).replace("manifest.json", "manifest.r1.json")
    recorder.train(stop=lambda: state.get("count", 0) > 6, damage=report)
    assert recorder.store.head(successor) is not None
    assert recorder.store.head(successor.replace("r1", "r2")) is None, "one report was true, the others found it whole"
    assert _stage(recorder, 2) == state["entry"].digest
    assert read_manifest(recorder.store, _key(recorder, 2), b"x" * 32).anchor == 2
    assert {key: recorder.store.get(key) for key in state["before"]} == state["before"], "what is damaged stays"
    (warning,) = [e.warning for e in recorder.events() if e.HasField("warning")]
    assert warning.reason == "POLICY_PUBLISHED_ANEW" and successor in warning.message

    recorder.commit(2, recorder.make_samples(2))  # goes on from the new anchor
    recorder.commit(3, recorder.make_samples(3, count=4, version=3), closing=True)
    recorder.train()
    assert _stage(recorder, 3) == _entry(recorder, 3).digest


def test_a_policy_that_is_whole_is_not_published_again(recorder: Recorder, config: RLConfig) -> None:
    recorder.record(config, steps=1, close=False)
    count = [0]

    def report() -> tuple[PolicyEntry, int] | None:
        if 1 not in recorder.digests():
            return None
        count[0] += 1
        return _entry(recorder, 1), count[0]

    recorder.train(stop=lambda: count[0] > 3, damage=report)
    assert recorder.store.head(_key(recorder, 1).replace("manifest.json", "manifest.r1.json")) is None
    assert not [e for e in recorder.events() if e.HasField("warning")]


def test_a_policy_that_cannot_be_made_again_ends_the_run_and_says_so(recorder: Recorder, config: RLConfig) -> None:
    recorder.record(config, steps=1, close=False)

    def report() -> tuple[PolicyEntry, int] | None:
        if 1 not in recorder.digests():
            return None
        return PolicyEntry(lineage=0, version=1, manifest_key=_key(recorder, 1), digest="ab" * 32), 1

    waited = [0]

    def stop() -> bool:
        waited[0] += 1
        return waited[0] > 200

    with pytest.raises(InvalidStateError, match="cannot make it again") as raised:
        recorder.train(stop=stop, damage=report)
    assert raised.value.reason == "POLICY_LOST"
    assert waited[0] < 200, "at once, not only when it is told to stop: without the policy no batch may ever come"


def test_a_damaged_manifest_is_written_anew_when_its_step_is_replayed(recorder: Recorder, config: RLConfig) -> None:
    recorder.record(config, steps=3, close=False)
    recorder.train(stop_at=3)
    digests = recorder.digests()
    _flip(_path(recorder, _key(recorder, 2)))
    recorder.train(stop_at=3)
    assert read_manifest(recorder.store, _key(recorder, 2)).digest == digests[2]
    assert _stage(recorder, 3) == digests[3]


@pytest.fixture
def lora_config(make_config: MakeConfig) -> RLConfig:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
    return make_config(ckpt={"interval": 1}, model={"seq_len": 32, "lora": lora})


BASE_DAMAGE: dict[str, Callable[[Recorder], None]] = {
    "object flipped": lambda recorder: _flip(_object(recorder, 0, "full")),
    "object missing": lambda recorder: _object(recorder, 0, "full").unlink(),
    "manifest flipped": lambda recorder: _flip(_path(recorder, _key(recorder, 0))),
}


def _base_digest(recorder: Recorder, version: int) -> str:
    """Of what a replica that has nothing reads below an adapter."""
    adapter = read_manifest(recorder.store, _key(recorder, version)).adapter
    assert adapter is not None
    found = HostCopy(recorder.store).stage(adapter.base_key).manifest.digest
    assert found == adapter.base_digest
    return found


@pytest.mark.parametrize("name", one_by_default(BASE_DAMAGE))
def test_the_damaged_base_of_adapters_is_published_anew(recorder: Recorder, lora_config: RLConfig, name: str) -> None:
    recorder.record(lora_config, steps=2, close=False)
    state: dict[str, Any] = {"count": 0}

    def report() -> tuple[PolicyEntry, int] | None:
        """Return a replica joins when version 2 is there and cannot read what the adapter is on: it names the
        adapter.
        """
        if 2 not in recorder.digests():
            return None
        if not state["count"]:
            state["digest"] = _base_digest(recorder, 2)
            BASE_DAMAGE[name](recorder)
            with pytest.raises((CorruptObjectError, NotFoundError)):
                _base_digest(recorder, 2)
        state["count"] += 1
        return _entry(recorder, 2), state["count"]

    recorder.train(stop=lambda: state["count"] > 4, damage=report)
    assert _base_digest(recorder, 2) == state["digest"]
    successor = _key(recorder, 0).replace("manifest.json", "manifest.r1.json")
    assert recorder.store.head(successor.replace("r1", "r2")) is None, "once"
    assert recorder.store.head(_key(recorder, 2).replace("manifest.json", "manifest.r1.json")) is None, "it is whole"
    (warning,) = [e.warning for e in recorder.events() if e.HasField("warning")]
    assert warning.reason == "POLICY_PUBLISHED_ANEW" and successor in warning.message

    recorder.commit(2, recorder.make_samples(2))
    recorder.train(stop_at=3)
    assert _base_digest(recorder, 3) == state["digest"]


def test_a_trainer_of_adapters_begins_although_its_base_is_damaged(recorder: Recorder, lora_config: RLConfig) -> None:
    recorder.record(lora_config, steps=3, close=False)
    recorder.train(stop_at=2)
    digest = _base_digest(recorder, 2)
    _flip(_path(recorder, _key(recorder, 0)))
    recorder.train(stop_at=3)
    assert _base_digest(recorder, 3) == _base_digest(recorder, 1) == digest
    assert "POLICY_PUBLISHED_ANEW" in [e.warning.reason for e in recorder.events() if e.HasField("warning")]
