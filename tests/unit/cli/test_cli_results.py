"""The policy, the plot and the summary that remain of a run, from a real directory store."""

import json
from pathlib import Path

import numpy as np
import pytest

from millrace.cli.session.follow import MetricsFile
from millrace.cli.session.results import (
    Artifacts,
    collect,
    download_policy,
    phases_of,
    split_uri,
    summary,
    summary_lines,
    write_summary,
)
from millrace.policies.manifest import PolicyPlace, Probe
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.storage import open_store
from millrace.v1 import event_pb2
from millrace_testing.runlog.recorded_run import evaluation, progress_of, recorded

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def published(tmp_path) -> tuple[str, str]:
    """Return a policy and a checkpoint manifest in a directory store; returns their URIs."""
    store = open_store((tmp_path / "my store").as_uri())
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    policy = publish_policy(
        store,
        PolicyPlace(prefix="millrace", uid="u1", lineage=0, version=3),
        PolicyContents(
            tensors=[("w", TensorBytes(dtype="float32", shape=(2, 3), data=memoryview(weights.tobytes())))],
            files={"config.json": b"{}"},
            probe=Probe(token_ids=(1,), logprobs=()),
        ),
        epoch=1,
    )
    key = "millrace/runs/u1/checkpoints/00000003/manifest.json"
    store.create(key, b"{}")
    return store.uri(policy.manifest_key), store.uri(key)


def test_split_uri():
    assert split_uri("file:///a/b%20c/millrace/runs/u1/policies/x/manifest.json", "u1") == (
        "file:///a/b%20c",
        "millrace/runs/u1/policies/x/manifest.json",
    )
    assert split_uri("s3://bucket/pre/fix/team-a/runs/u1/x", "u1") == ("s3://bucket/pre/fix", "team-a/runs/u1/x")
    with pytest.raises(ValueError, match="is no object of run u2"):
        split_uri("file:///a/millrace/runs/u1/x", "u2")


def test_collect_downloads_verifies_and_plots(tmp_path, published):
    progress = progress_of(recorded(policy_uri=published[0], checkpoint_uri=published[1]))
    found = collect(progress, tmp_path / "out", store_url=None)
    policy = Path(found.policy_path or "")
    assert sorted(path.name for path in policy.iterdir()) == ["config.json", "model.safetensors"]
    assert found.checkpoint_path == str(tmp_path / "my store/millrace/runs/u1/checkpoints/00000003")
    assert Path(found.plot_path or "").read_bytes().startswith(PNG)


def test_store_of_the_settings_is_used(tmp_path, published):
    progress = progress_of(recorded(policy_uri="s3://elsewhere" + published[0].split("my%20store")[-1]))
    url = (tmp_path / "my store").as_uri()
    assert download_policy(progress, tmp_path / "p", store_url=url) == str(tmp_path / "p")


def test_policy_that_is_out_of_reach_is_named_by_its_uri(tmp_path):
    uri = "file:///no/such/dir/millrace/runs/u1/policies/0000-00000003/manifest.json"
    progress = progress_of(recorded(policy_uri=uri, checkpoint_uri=uri))
    found = collect(progress, tmp_path, store_url=None)
    assert found.policy_path == uri and found.checkpoint_path == uri


def test_plot_of_a_run_without_steps(tmp_path):
    assert Path(collect(progress_of([]), tmp_path, store_url=None).plot_path or "").read_bytes().startswith(PNG)


def test_summary_keys_values_and_text(tmp_path):
    progress = progress_of(recorded())
    artifacts = Artifacts(policy_path="/p", checkpoint_path="/c", plot_path="/r.png")
    data = summary(progress, artifacts, seconds=12.34567, phases={"stack_s": 2.0, **phases_of(progress)})
    assert list(data)[:9] == [
        "reward_before",
        "reward_after",
        "steps",
        "seconds",
        "trainer_wait_ratio",
        "mismatch_kl",
        "policy_path",
        "checkpoint_path",
        "plot_path",
    ]
    assert data["reward_before"] == 0.45 and data["reward_after"] == 0.75 and data["steps"] == 3
    assert data["trainer_wait_ratio"] == 0.5 and data["mismatch_kl"] == 2e-9
    assert data["phases"] == {"stack_s": 2.0, "start_s": 2.0, "train_s": 7.0, "finish_s": 1.0}
    write_summary(data, tmp_path / "deep" / "summary.json")
    assert json.loads((tmp_path / "deep" / "summary.json").read_text()) == data
    text = "\n".join(summary_lines(data))
    assert "held-out reward  0.450 → 0.750  (+0.300)" in text and "policy           /p" in text


def test_the_summary_names_spans_of_versions_and_what_was_not_evaluated():
    late = evaluation(8, 9, 0.8, skipped=(4, 6), newest=9)
    data = summary(
        progress_of([*recorded(), late]),
        Artifacts(policy_path=None, checkpoint_path=None, plot_path=None),
        seconds=1,
        phases={},
    )
    assert [(e["step"], e["policy_version"], e["policy_version_max"], e["skipped"]) for e in data["evals"]] == [
        (0, 0, 0, []),
        (3, 3, 3, []),
        (8, 8, 9, [4, 6]),
    ]
    assert "not evaluated    reverse-text: v4, v6" in summary_lines(data)


def test_the_summary_says_how_old_rollouts_were_and_how_many_came_too_late_by_environment():
    late = {"batch/dropped/stale/slow": 4.0, "stale_share/slow/mean": 0.31, "stale_share/slow/slowest_quarter": 0.8}
    ages = dict.fromkeys(("staleness/quick/mean", "staleness/quick/max", "staleness/slow/mean"), 1.0)
    events = [
        event_pb2.Event(batch_committed=event_pb2.BatchCommitted(step=0, metrics=late)),
        event_pb2.Event(step_completed=event_pb2.StepCompleted(step=0, metrics=ages)),
    ]
    artifacts = Artifacts(policy_path=None, checkpoint_path=None, plot_path=None)
    data = summary(progress_of(events), artifacts, seconds=1, phases={})
    assert data["staleness"]["slow"]["num_stale"] == 4 and data["staleness"]["slow"]["slow_share"] == 0.8
    lines = summary_lines(data)
    assert "staleness        quick: 1.0 steps, at most 1" in lines
    assert any("slow: 1.0 steps; 4 groups dropped as stale (31%" in line for line in lines)


def test_summary_of_a_run_without_evaluation_has_nulls(tmp_path):
    data = summary(
        progress_of([]), Artifacts(policy_path=None, checkpoint_path=None, plot_path=None), seconds=1, phases={}
    )
    assert data["reward_before"] is None and data["reward_after"] is None and data["mismatch_kl"] is None
    assert not any(word in line for line in summary_lines(data) for word in ("held-out", "mismatch", "checkpoint"))


def test_metrics_file_has_one_line_per_step_eval_and_score(tmp_path):
    metrics = MetricsFile(tmp_path / "a" / "metrics.jsonl")
    for event in recorded():
        metrics.write(event)
    metrics.close()
    rows = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["eval", "step", "step", "step", "eval", "score"]
    assert rows[1]["step"] == 0 and rows[1]["num_tokens"] == 14200 and rows[1]["metrics"]["loss/mean"] == 0.1
    assert rows[0]["reward_mean"] == 0.45 and rows[0]["num_failed"] == 0
