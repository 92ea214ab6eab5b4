"""`millrace run samples` and `millrace eval show`, on archives as a run writes them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.cli.main import main
from millrace.cli.offline.samples import SampleRecord, TrainingRows
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutError, RolloutStatus, Sample
from millrace.rollouts.wire import encode_archive
from millrace.runlog.names import Deployment, Names
from millrace.runlog.records.run_record import EVAL, RunRecord
from millrace.storage.local import LocalStore

UID = "01a205f04e00c6b2d345401dca64"
HOSTILE = "\x1b[31mred\x9b2J\u202e <script>\n" + "x" * 300


def rollout(ordinal: int, member: int, reward: float, reply: str, **changes: Any) -> Rollout:
    messages = [{"role": "user", "content": f"task {ordinal}"}, {"role": "assistant", "content": reply}]
    fields: dict[str, Any] = {
        "run_uid": UID,
        "purpose": Purpose.TRAIN,
        "ordinal": ordinal,
        "member": member,
        "attempt": 0,
        "group_size": 2,
        "env": "letters",
        "task_index": ordinal,
        "task_id": f"id-{ordinal}",
        "status": RolloutStatus.OK,
        "reward": reward,
        "messages_json": json.dumps(messages),
        "task_json": json.dumps({"answer": f"answer {ordinal}"}),
        "metrics": {"share": reward},
    }
    return Rollout(**{**fields, **changes})


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`outputs/letters-1` with the store of a run of two steps."""
    monkeypatch.chdir(tmp_path)
    for name in ("MILLRACE_STORE_URL", "MILLRACE_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "outputs" / "letters-1"
    store, names = LocalStore(directory / "store"), Names("millrace", UID)
    store.create(Deployment("millrace").name_object("letters-1"), UID.encode())
    failed = rollout(
        1,
        0,
        0.0,
        "",
        status=RolloutStatus.ENV_ERROR,
        error=RolloutError(type="KeyError", message="'x'", frames="letters.py:9 f"),
    )
    steps = [
        [rollout(0, 0, 0.25, "abba"), rollout(0, 1, 0.75, HOSTILE)],
        [failed, rollout(1, 1, 0.5, "Ärger"), rollout(1, 1, 0.5, "again", attempt=1, is_duplicate=True)],
    ]
    for step, rollouts in enumerate(steps):
        commit(store, step, rollouts)
    store.create(f"{names.rollout_data(9, 1, 'n')}rollouts.pb.zst", encode_archive(steps[0]))  # its writer was killed
    return directory


def commit(store: LocalStore, step: int, rollouts: list[Rollout]) -> None:
    """A batch whose header names an archive of these."""
    names = Names("millrace", UID)
    header = batch_pb2.BatchHeader(run_uid=UID, kind=batch_pb2.BATCH_KIND_TRAIN, step=step)
    header.rollouts_key = f"{names.rollout_data(step, 1, 'n')}rollouts.pb.zst"
    archive = encode_archive(rollouts)
    store.create(header.rollouts_key, archive)
    header.rollouts_sha256 = hashlib.sha256(archive).digest()
    store.create(names.batch_header(step), header.SerializeToString())


def sampled(*versions: int) -> Sample:
    """One token of each version behind one of the prompt."""
    count = 1 + len(versions)
    return Sample(
        token_ids=np.arange(count, dtype=np.int32),
        loss_mask=np.array([0, *(1 for _ in versions)], np.uint8),
        inference_logprobs=np.zeros(count, np.float32),
        policy_spans=tuple(
            PolicySpan(lineage=0, version=version, start=at, end=at + 1) for at, version in enumerate(versions, start=1)
        ),
    )


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv]) == 0
    return capsys.readouterr().out


def records(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    lines = shown(capsys, "run", "samples", "letters-1", "-o", "json", *argv).splitlines()
    return [json.loads(line) for line in lines]


def conversation(*roles: str, **last: Any) -> str:
    messages = [{"role": role, "content": f"{role} {at}"} for at, role in enumerate(roles)]
    return json.dumps([*messages[:-1], {**messages[-1], **last}])


UNFIT = {
    "failed": {"status": RolloutStatus.TIMEOUT},
    "ended at the token limit": {"is_truncated": True},
    "too long to be kept whole": {
        "messages_json": conversation("user", "assistant", content="abc… (99 characters cut)")
    },
    "with tools": {"num_turns": 2, "messages_json": conversation("user", "assistant", "tool", "assistant")},
    "with assistant messages that nobody sampled": {
        "messages_json": conversation("user", "assistant", "user", "assistant")
    },
    "without an answer at the end": {"messages_json": conversation("user", "assistant", content="")},
}


@pytest.mark.parametrize("reason", UNFIT)
def test_what_a_trained_model_would_read_otherwise_is_no_row(reason: str) -> None:
    rows = TrainingRows()
    assert rows.row(SampleRecord(0, rollout(0, 0, 1.0, "yes", num_turns=1))) is not None
    assert rows.row(SampleRecord(0, rollout(0, 1, 1.0, "yes", **{"num_turns": 1} | UNFIT[reason]))) is None
    assert rows.describe().startswith(f"1 rows; left out: 1 {reason}")


def test_rows_of_all_samples_that_pass_the_filter(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(run_directory / "store")
    more = [rollout(2, member, member / 50, f"reply {member}", num_turns=1, group_size=50) for member in range(50)]
    commit(store, 2, more)
    assert main(["run", "samples", "letters-1", "-o", "sft", "--min-reward", "0.5", "--step", "2"]) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    said = [{"role": "user", "content": "task 2"}, {"role": "assistant", "content": "reply 25"}]
    assert len(rows) == 25 and rows[0] == {"messages": said} and captured.err == "25 rows\n"
    assert main(["run", "samples", "letters-1", "-o", "sft", "--limit", "3", "--sort", "-reward"]) == 0
    replies = [json.loads(line)["messages"][1]["content"] for line in capsys.readouterr().out.splitlines()]
    assert replies == ["reply 49", "reply 48", "reply 47"]


def test_every_sample_is_listed_once(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "run", "samples", "letters-1")
    lines = text.splitlines()
    assert " ".join(lines[0].split()) == "id environment task status reward tokens prompt reply or error"
    assert [line.split()[2] for line in lines[1:5]] == ["0.0", "0.1", "1.0", "1.1"]
    assert "KeyError: 'x'" in lines[3] and lines[5].startswith("4 of 4 samples")
    assert max(map(len, lines)) < 200, "long texts are cut"


@pytest.mark.parametrize(
    ("argv", "tasks"),
    [
        (("--step", "1"), [(1, 0), (1, 1)]),
        (("--task", "0"), [(0, 0), (0, 1)]),
        (("--status", "env_error"), [(1, 0)]),
        (("--min-reward", "0.5"), [(0, 1), (1, 1)]),
        (("--max-reward", "0.25", "--status", "ok"), [(0, 0)]),
        (("--text", "ABBA"), [(0, 0)]),
        (("--env", "other"), []),
        (("--purpose", "train", "--step", "0"), [(0, 0), (0, 1)]),
        (("--purpose", "eval"), []),
        (("--sort", "-reward", "--limit", "2"), [(0, 1), (1, 1)]),
    ],
)
def test_samples_are_chosen(
    run_directory: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], tasks: list[tuple[int, int]]
) -> None:
    assert [(record["task"], record["member"]) for record in records(capsys, *argv)] == tasks


def test_a_record_has_what_a_program_wants(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = records(capsys, "--status", "env_error")
    assert record["error"] == {"type": "KeyError", "message": "'x'", "frames": "letters.py:9 f"}
    assert record["given"] == {"answer": f"answer {record['task']}"}
    assert (record["id"], record["step"]) == ("1-0", 1) and record["messages"][0] == {
        "role": "user",
        "content": "task 1",
    }


def test_what_evaluated_a_policy_says_of_which_version(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played = rollout(0, 0, 0.5, "aha", purpose=Purpose.EVAL, eval_id="letters@4-e1", samples=(sampled(4, 5),))
    commit(LocalStore(run_directory / "store"), 2, [played])
    (record,) = records(capsys, "--purpose", "eval")
    assert (record["purpose"], record["eval_id"], record["versions"]) == ("eval", "letters@4-e1", [4, 5])
    for more in ([], ["--full"]):
        assert "letters (eval of v4–v5)" in shown(capsys, "run", "samples", "letters-1", "--purpose", "eval", *more)


def test_what_a_model_wrote_cannot_steer_the_terminal(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--full"]):
        text = shown(capsys, "run", "samples", "letters-1", *argv)
        assert "␛[31mred\\x9b2J\\u202e" in text
        assert not {"\x1b", "\x9b", "\u202e"} & set(text)


def test_an_evaluation_is_shown_by_its_directory(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(LocalStore(run_directory / "store"), 2, [rollout(0, 0, 0.5, "Ärger", purpose=Purpose.EVAL, eval_id="e1")])
    text = shown(capsys, "eval", "show", "outputs/letters-1", "--full", "--text", "Ärger")
    assert "assistant:\n  Ärger\n" in text and text.endswith("1 of 1 samples\n")


def test_eval_show_leaves_training_rollouts_out(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "eval", "show", "letters-1")
    assert text.endswith("0 of 0 samples of an evaluation; --purpose train shows those of training\n")
    assert "4 of 4 samples" in shown(capsys, "eval", "show", "letters-1", "--purpose", "train")
    evaluation = RunRecord(uid=UID, name="letters-1", kind=EVAL, config={})
    LocalStore(run_directory / "store").create(Names("millrace", UID).run_json, evaluation.encode())
    played = rollout(0, 0, 0.5, "aha", purpose=Purpose.EVAL, eval_id="e1", samples=(sampled(4, 5),))
    commit(LocalStore(run_directory / "store"), 2, [played])
    for more in ([], ["--full"]):  # one fixed model has no versions
        text = shown(capsys, "eval", "show", "letters-1", *more)
        assert "letters " in text and "v4" not in text and "1 of 1 samples" in text


def test_a_conversation_that_cannot_be_read_is_said(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(LocalStore(run_directory / "store"), 2, [rollout(2, 0, 1.0, "", messages_json='{"a": ')])
    assert "not kept in a form that can be shown" in shown(
        capsys, "run", "samples", "letters-1", "--full", "--step", "2"
    )


def test_a_run_is_found_by_the_beginning_of_its_name_or_as_the_newest(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("lett", "-", "runs/letters-1"):
        assert shown(capsys, "run", "samples", name).endswith("4 of 4 samples; --full shows conversations\n")
    (run_directory.parent / "letters-2" / "store").mkdir(parents=True)
    assert main(["run", "samples", "lett"]) != 0
    assert "letters-1, letters-2" in capsys.readouterr().err


def test_an_unknown_run_is_named(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "samples", "outputs/letters-1/../letters-1", "--sort", "reward"]) == 0
    assert main(["run", "samples", "nothing", "--store", (run_directory / "store").as_uri()]) != 0
    assert "nothing" in capsys.readouterr().err
