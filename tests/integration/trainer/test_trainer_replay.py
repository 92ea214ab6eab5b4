"""`millrace run replay` over recorded logs: equal digests, differing tensors, another loss, and nothing written."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.cli.main import main
from millrace.cli.offline.audit import AuditRequest, audit_here
from millrace.config.sections.rl import RLConfig
from millrace.internal.v1 import batch_pb2
from millrace.policies.host_copy import pull_tensors, read_manifest
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.rollouts.batch_wire import decode_header
from millrace.rollouts.token_log import encode_token_log
from millrace.runlog import chain_hash
from millrace.runlog.names import Names
from millrace.runlog.records.token_logs import find_token_log, load_token_log
from millrace.storage.base import with_checksum
from millrace.trainer.learning import learner

Recorder = Any  # conftest.Recorder; tests are not importable from one another
MakeConfig = Callable[..., RLConfig]
LOSSES = "millrace_testing.trainer.other_losses"


def train(recorder: Recorder, config: RLConfig) -> Recorder:
    """Return the recorder with a finished run of 5 steps, which has checkpoints 2, 4 and 5 and a name."""
    recorder.record(config, steps=5)
    recorder.train()
    recorder.store.create(f"{recorder.prefix}/names/tiny-run", recorder.uid.encode())
    return recorder


@pytest.fixture
def trained(recorder: Recorder, make_config: MakeConfig) -> Recorder:
    """Return a finished run that the test may change."""
    return train(recorder, make_config(ckpt={"interval": 2}))


@pytest.fixture(scope="module")
def finished(recorder_of_module: Recorder, make_config: MakeConfig) -> Recorder:
    """Return a finished run that no test changes."""
    return train(recorder_of_module, make_config(ckpt={"interval": 2}))


def _replay(recorder: Recorder, batch: int, *more: str, run: str = "tiny-run") -> int:
    where = ("--store", recorder.store_url, "--prefix", recorder.prefix)
    return main(["run", "replay", run, "--step", str(batch + 1), *where, *more])


def _objects(recorder: Recorder) -> list[Any]:
    return list(recorder.store.list(""))


@pytest.mark.parametrize(
    ("step", "start"), [(1, 0), *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, 2), (3, 2), (4, 4)))]
)
def test_every_step_is_recomputed_bit_for_bit_and_nothing_is_written(
    finished: Recorder, capsys: pytest.CaptureFixture[str], step: int, start: int
) -> None:
    before = _objects(finished)
    assert _replay(finished, step) == 0
    out, err = capsys.readouterr()
    assert f"recomputed step {step + 1} (batch {step}) of tiny-run ({finished.uid}) from version {start}" in out
    assert f"equal: version {step + 1} has digest {finished.digests()[step + 1]}" in out
    assert [line for line in err.splitlines() if "steps" in line] == [
        f"replaying tiny-run: {done} of {step + 1 - start} steps" for done in range(step + 2 - start)
    ]
    assert _objects(finished) == before


def test_a_version_that_was_published_with_other_weights_is_told_tensor_by_tensor(
    trained: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"{trained.root}policies/0000-00000004/manifest.json"
    manifest = read_manifest(trained.store, key)
    tensors = pull_tensors(trained.store, manifest)
    values = tensors["model.norm.weight"].numpy().copy()
    values[[1, 3]] += 0.5
    changed = {**tensors, "model.norm.weight": TensorBytes.from_numpy(values)}
    trained.store.delete(key)
    publish_policy(
        trained.store,
        PolicyPlace(prefix=trained.prefix, uid=trained.uid, lineage=0, version=4),
        PolicyContents(tensors=changed.items(), files=manifest.files),
        epoch=9,
    )
    assert _replay(trained, 3) == 1
    lines = capsys.readouterr().out.splitlines()
    different = next(line for line in lines if line.startswith("different: version 4 "))
    assert (
        manifest.digest in different and trained.digests()[4] in different and trained.digests()[4] != manifest.digest
    )
    table = [line.split() for line in lines[lines.index(different) + 1 :]]
    assert table == [["TENSOR", "DIFFERING", "MAX", "ABS"], ["model.norm.weight", "2", "of", "16", "0.5"]]


def test_metrics_under_another_loss_beside_the_originals(
    finished: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _objects(finished)
    assert _replay(finished, 3, "--loss", f"{LOSSES}:doubled") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("equal:") for line in lines)  # trying a loss leaves the step itself as it was
    header = next(index for index, line in enumerate(lines) if line.startswith("METRIC OF STEP 4"))
    assert lines[header].split()[-1] == f"{LOSSES}:doubled"
    metrics = {row[0]: row[1:] for row in (line.split() for line in lines[header + 1 :])}
    mine, other = (float(value) for value in metrics["loss/mean"])
    assert mine != 0 and other == pytest.approx(2 * mine, rel=1e-4)
    norms = [float(value) for value in metrics["optim/grad_norm"]]
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-4)
    assert len(set(metrics["mismatch_kl/mean"])) == 1
    step = next(
        e.step_completed for e in finished.events() if e.HasField("step_completed") and e.step_completed.step == 3
    )
    assert mine == pytest.approx(step.metrics["loss/mean"], rel=1e-4)
    assert _objects(finished) == before


def test_regularizers_of_the_run_add_to_another_loss_as_they_do_in_a_run(
    recorder: Recorder, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = {"kl": {"coef": 0.5}, "entropy_coef": 0.25}
    recorder.record(make_config(ckpt={"interval": 2}, loss=loss), steps=3)
    recorder.train()
    recorder.store.create(f"{recorder.prefix}/names/tiny-run", recorder.uid.encode())
    assert _replay(recorder, 2, "--loss", "millrace.trainer.losses:policy_losses") == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["loss/mean"][0] == rows["loss/mean"][1], "the policy loss of the run itself"
    assert rows["optim/grad_norm"][0] == rows["optim/grad_norm"][1]


def test_steps_before_the_first_checkpoint_are_computed_with_as_many_threads(
    recorder: Recorder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        recorder.record(make_config(ckpt={"interval": 2}), steps=3)
        recorder.train()
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        recorder.store.create(f"{recorder.prefix}/names/tiny-run", recorder.uid.encode())
        assert _replay(recorder, 1) == 0
        assert torch.get_num_threads() == 2
        assert "last bits may differ" not in capsys.readouterr().out
    finally:
        torch.set_num_threads(threads)


def test_a_damaged_checkpoint_is_left_aside_and_noted(trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    trained.store.put(f"{trained.root}checkpoints/00000002/manifest.json", b"{}")
    assert _replay(trained, 2) == 0
    assert "note: damaged checkpoints are left aside: checkpoint 2: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("nothing", "must be module:function"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported: ModuleNotFoundError"),
        (f"{LOSSES}:missing", "has no 'missing'"),
        (f"{LOSSES}:NOT_A_FUNCTION", "has a int, not a function, as 'NOT_A_FUNCTION'"),
        (f"{LOSSES}:a_number", "it returned a float, not a millrace.trainer.losses.TokenLosses"),
        (f"{LOSSES}:per_sequence", "its rl must be a tensor of shape"),
        (f"{LOSSES}:constant", "so it trains nothing"),
        (f"{LOSSES}:broken", "it raised ZeroDivisionError: by design"),
    ],
)
def test_a_bad_loss_is_told_in_words(
    finished: Recorder, capsys: pytest.CaptureFixture[str], loss: str, words: str
) -> None:
    assert _replay(finished, 4, "--loss", loss) == 2
    err = capsys.readouterr().err
    assert f"--loss: {words}" in err or (words in err and "--loss: " in err)
    assert "remedy: write it like millrace.trainer.losses.policy_losses" in err and "Traceback" not in err


def test_a_replay_that_makes_rows_otherwise_says_so(
    finished: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learner, "packing_of", lambda *args, **keys: None)
    _replay(finished, 4)
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("note: "))
    assert "last bits may differ, because rows was packed by cost: " in told and ", is one sample each" in told


@pytest.mark.parametrize("step", [5, 6, 400])
def test_a_step_that_was_not_taken_names_the_range(
    finished: Recorder, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    assert _replay(finished, step) == 2
    assert f"step {step + 1} of run {finished.uid} is not there (yet): it has 5" in capsys.readouterr().err


def test_steps_before_the_oldest_checkpoint_end_with_their_batches(
    trained: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    for info in list(trained.store.list(f"{trained.root}batches/00000000/")):
        trained.store.delete(info.key)
    assert _replay(trained, 1) == 2
    assert "is too old to be recomputed" in (err := capsys.readouterr().err)
    assert "keeps what is needed for steps 3 to 5" in err
    assert _replay(trained, 2) == 0


def test_a_version_that_is_not_published_has_only_metrics(
    trained: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.store.delete(f"{trained.root}policies/0000-00000005/manifest.json")
    assert _replay(trained, 4) == 2
    assert "version 5" in (err := capsys.readouterr().err) and "nothing to compare with" in err
    assert _replay(trained, 4, "--loss", f"{LOSSES}:doubled") == 0
    assert "version 5 is not published" in capsys.readouterr().out


def test_runs_are_found_by_name_beginning_uid_and_age(finished: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("runs/tiny-run", "tiny", finished.uid, "-"):
        assert _replay(finished, 4, run=run) == 0
    assert _replay(finished, 4, run="tinyrun") == 3
    assert "did you mean tiny-run?" in capsys.readouterr().err


@pytest.mark.long
def test_without_redis_and_without_the_model_directory(
    recorder: Recorder, make_config: MakeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    """The installed command in a process of its own: the run's model is gone, Redis is not named."""
    import shutil

    moved = shutil.copytree(tiny_model, tmp_path / "model")
    recorder.record(make_config(name=str(moved), ckpt={"interval": 2}), steps=3)
    recorder.train()
    shutil.rmtree(moved)
    command = [sys.executable, "-m", "millrace.cli", "run", "replay", recorder.uid, "--step", "2"]
    recorder.store.create(f"{recorder.prefix}/names/gone", recorder.uid.encode())
    environ = {"PATH": "", "MILLRACE_STORE_URL": recorder.store_url, "MILLRACE_PREFIX": recorder.prefix}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert recorder.digests()[2] in ended.stdout


def test_other_conditions_are_noted(trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    key = f"{trained.root}checkpoints/00000002/manifest.json"
    manifest = json.loads(trained.store.get(key))
    manifest["world_size"] = 4
    trained.store.put(key, with_checksum(manifest))
    assert _replay(trained, 2) == 0
    assert "note: last bits may differ, because world_size was 4, is 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("store", "words"), [("file:///nowhere/at/all", "is not there"), (None, "there is no outputs/local/store here")]
)
def test_a_store_that_is_not_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: str | None,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLRACE_STORE_URL", raising=False)
    assert main(["run", "replay", "x", "--step", "1", *(("--store", store) if store else ())]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_changed_batch_with_every_hash_redone_is_found_by_a_replay_only(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    """The newest header is named by nothing yet: only the weights that were made of its batch contradict it."""
    recorder.record(make_config(ckpt={"interval": 2}), steps=3, close=False)
    recorder.train(stop_at=3)
    recorder.store.create(f"{recorder.prefix}/names/tiny-run", recorder.uid.encode())
    names = Names(recorder.prefix, recorder.uid)

    def audited() -> tuple[set[str], set[str], list[int]]:
        without, found = (
            audit_here(
                AuditRequest(
                    name="tiny-run",
                    store=recorder.store_url,
                    redis=None,
                    prefix=recorder.prefix,
                    is_deep=True,
                    num_replays=num_replays,
                    attestations=(),
                    key=None,
                    jobs=None,
                    resume=None,
                ),
                say=lambda text: None,
            )
            for num_replays in (None, 1)
        )
        assert not without.replayed_steps
        known = {f"{each.check}: {each.message}" for each in without.violations}
        replayed = {each.check for each in found.violations if f"{each.check}: {each.message}" not in known}
        return known, replayed, list(found.replayed_steps)

    before, replayed, steps = audited()
    assert (replayed, steps) == (set(), [2])
    header = decode_header(recorder.store.get(names.batch_header(2)))
    chunk = batch_pb2.BatchChunk.FromString(recorder.store.get(header.chunks[0].key))
    chunk.advantages.values = (-2 * np.frombuffer(chunk.advantages.values, np.float32)).tobytes()
    data = chunk.SerializeToString(deterministic=True)
    header.chunks[0].sha256, header.chunks[0].size_bytes = hashlib.sha256(data).digest(), len(data)
    recorder.store.put(header.chunks[0].key, data)
    stored = header.SerializeToString(deterministic=True)
    recorder.store.put(names.batch_header(2), stored)
    saved = json.loads(recorder.store.get(names.checkpoint_manifest(3)))
    changed = chain_hash(header.previous_chain_hash, stored)
    saved["chain_hash"] = changed.hex()
    recorder.store.put(names.checkpoint_manifest(3), with_checksum(saved))
    logged = find_token_log(recorder.store, names, 2)
    assert logged is not None
    log = load_token_log(recorder.store, logged)
    recorder.store.put(logged, encode_token_log(replace(log, chain_hash=changed)))
    after, replayed, steps = audited()
    assert after == before, "no hash and no size contradicts it"
    assert (replayed, steps) == ({"REPLAY_DIFFERS"}, [])
