"""Tasks, outcomes, groups, frames and settings: no services."""

import asyncio
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.custom_code import environment_module
from millrace.env_server import settings as own_settings
from millrace.env_server.adapters import adapter
from millrace.env_server.adapters.outcome import (
    Outcome,
    bounded_json,
    checked,
    failed,
    finite_metrics,
    make_rollout,
)
from millrace.env_server.adapters.selection import build_task_table, canonical_json, no_tasks
from millrace.env_server.isolation.confinement import Confinement, Isolation
from millrace.env_server.isolation.limits import WorkerLimits, describe_exit
from millrace.env_server.isolation.namespaces import VisibleFiles, covered, visible_to_workers
from millrace.env_server.service import GroupInPlay, GroupKey, Groups
from millrace.env_server.settings import EnvServerSettings
from millrace.env_server.workers import frames
from millrace.env_server.workers.env_worker import answer_of, ended_frame
from millrace.env_server.workers.frames import encode_frame, read_frame
from millrace.errors import CorruptObjectError, FencedError, InvalidSpecError, NotFoundError
from millrace.internal.v1 import env_worker_pb2, rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest
from millrace.rollouts.types import RolloutStatus, Sample, Trace, TurnReward
from millrace.rollouts.wire import rollout_to_proto


def request(**changes: Any) -> PlayGroupRequest:
    values: dict[str, Any] = {
        "run_uid": "r1",
        "purpose": rollout_pb2.PURPOSE_TRAIN,
        "ordinal": 4,
        "members": [0, 1],
        "group_size": 2,
        "env": EnvSpec(name="n", id="i"),
    }
    return PlayGroupRequest(**{**values, **changes})


# Tasks.


def test_canonical_json_knows_only_content() -> None:
    assert canonical_json({"b": 1, "a": "é"}) == canonical_json({"a": "é", "b": 1}) == '{"a":"é","b":1}'.encode()
    assert b"set" in canonical_json({"x": {1}})


def test_task_table() -> None:
    rows = [{"q": index} for index in range(3)]
    table = build_task_table(3, row=rows.__getitem__, content=rows.__getitem__)
    again = build_task_table(3, row=rows.__getitem__, content=lambda index: dict(reversed(rows[index].items())))
    other = build_task_table(2, row=rows.__getitem__, content=rows.__getitem__)
    assert len(table) == 3 and len(set(table.ids)) == 3 and table.row(1) == {"q": 1}
    assert (table.digest, table.ids) == (again.digest, again.ids)
    assert table.digest != other.digest and list(table.ids[:2]) == list(other.ids)
    assert len(no_tasks()) == 0


# Outcomes.


def test_failed_outcome_keeps_the_conversation_and_drops_what_could_be_trained() -> None:
    played = Outcome(status=RolloutStatus.OK, reward=1.0, messages=[{"role": "user", "content": "x"}], num_turns=3)
    outcome = failed(RolloutStatus.ENV_ERROR, "E", "m", of=played)
    assert (outcome.reward, outcome.samples, outcome.num_turns, outcome.messages) == (0.0, (), 3, played.messages)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_reward_must_be_finite(reward: float) -> None:
    outcome = checked(Outcome(status=RolloutStatus.OK, reward=reward))
    assert (outcome.status, outcome.error_type) == (RolloutStatus.ENV_ERROR, "NonFiniteReward")


@pytest.mark.parametrize("value", [1e39, -1.5e308, float("nan")])
@pytest.mark.parametrize("where", ["reward", "turn 2", "agent 'solver'"])
def test_a_reward_is_of_a_size_that_can_be_trained_on_wherever_it_stands(value: float, where: str) -> None:
    turns = (TurnReward(end=1, reward=0.0), TurnReward(end=2, reward=value if where == "turn 2" else 0.0))
    sample = Sample(
        token_ids=np.zeros(2, np.int32),
        loss_mask=np.ones(2, np.uint8),
        inference_logprobs=np.zeros(2, np.float32),
        turns=turns,
    )
    agent = Trace(agent="solver", reward=value if where.startswith("agent") else 0.0, num_samples=1)
    reward = value if where == "reward" else 0.0
    good = Outcome(status=RolloutStatus.OK, samples=[sample], reward=reward, metrics={"share": value}, traces=[agent])
    found = checked(good)
    assert found.status is RolloutStatus.ENV_ERROR and not found.samples
    assert where in found.error_message and f"is {value} (share = {value})" in found.error_message
    assert found.error_type == ("RewardTooLarge" if math.isfinite(value) else "NonFiniteReward")


def test_finite_metrics() -> None:
    assert finite_metrics({"a": 1, "b": float("nan"), "c": "x", "d": True}) == {"a": 1.0, "d": 1.0}
    of_libraries = {"e": np.float32(0.5), "f": np.int64(2), "g": np.bool_(1), "h": Decimal("0.25")}
    assert finite_metrics(of_libraries) == {"e": 0.5, "f": 2.0, "g": 1.0, "h": 0.25}
    assert finite_metrics({"i": np.float32("inf"), "j": 10**400, "k": {"l": 1}, "m": "1"}) == {}


@pytest.mark.parametrize("count", [1, 40, 3000])
@pytest.mark.parametrize("size", [10, 5000, 200_000])
def test_conversation_is_bounded_and_stays_json(count: int, size: int) -> None:
    if count * size > 20_000_000:
        count = 40
    text = bounded_json([{"role": "user", "content": "é" * size}] * count)
    assert len(text.encode()) <= 64 * 1024
    assert json.loads(text)[0]["content"].startswith("é" * 5) or count > 1000


def test_conversation_with_a_broken_character() -> None:
    text = bounded_json([{"role": "assistant", "content": "\ud800"}])
    assert json.loads(text)[0]["content"] == "?"


def test_failed_rollout_is_bounded_and_passes_the_wire() -> None:
    outcome = failed(RolloutStatus.MODEL_ERROR, "E", "x" * 5000 + "\ud800")
    rollout = make_rollout(request(), member=1, task_id="t", outcome=outcome, seconds=1.5)
    proto = rollout_to_proto(rollout)
    assert proto.status == rollout_pb2.ROLLOUT_STATUS_MODEL_ERROR and len(proto.error.message) == 2000
    assert (proto.ordinal, proto.member, proto.group_size, proto.env) == (4, 1, 2, "n")


# Groups.


def test_epochs_only_grow() -> None:
    groups = Groups()
    groups.check_epoch("r1", 3)
    groups.check_epoch("r1", 3)
    groups.check_epoch("r2", 1)
    with pytest.raises(FencedError, match="epoch 2 is older than epoch 3"):
        groups.check_epoch("r1", 2)


def test_group_ends_with_its_last_member_and_is_remembered() -> None:
    groups = Groups()
    group = GroupInPlay(request=request(), left={0, 1})
    groups.add(group)
    assert groups.num_rollouts == 2 and groups.is_known(GroupKey("r1", rollout_pb2.PURPOSE_TRAIN, "", 4, 0))
    groups.finish_member(group, 0)
    assert group.described().members == [1]
    groups.finish_member(group, 1)
    assert groups.num_rollouts == 0 and groups.of_run("r1") == []
    assert groups.is_known(group.key) and not groups.is_known(group.key._replace(attempt=1))


def test_finished_groups_are_remembered_until_they_are_resolved_and_those_of_evaluations_until_the_run_ends() -> None:
    groups = Groups()
    keys = list[GroupKey]()
    for uid, eval_id, ordinal in itertools.product(("r1", "r2"), ("", "e"), range(50)):
        group = GroupInPlay(request=request(run_uid=uid, eval_id=eval_id, ordinal=ordinal), left={0})
        groups.add(group)
        groups.finish_member(group, 0)
        keys.append(group.key)
    assert all(map(groups.is_known, keys))
    groups.forget_finished("r1", resolved_below=48)
    assert not any(map(groups.is_known, keys[:48])) and all(map(groups.is_known, keys[48:]))
    groups.forget_finished("r1")
    assert not any(map(groups.is_known, keys[:100])) and all(map(groups.is_known, keys[100:]))


def test_cancelled_group_may_be_played_again() -> None:
    groups = Groups()
    group = GroupInPlay(request=request(), left={0, 1})
    groups.add(group)
    groups.cancel(group)
    assert groups.num_rollouts == 0 and not groups.is_known(group.key)
    groups.finish_member(group, 0)  # a late end of its task
    assert not groups.is_known(group.key)


# Frames.


async def test_frames_round_trip_and_end() -> None:
    reader = asyncio.StreamReader()
    command = env_worker_pb2.WorkerCommand(cancel=env_worker_pb2.CancelPlay(play_id=7))
    reader.feed_data(encode_frame(command))
    reader.feed_data(encode_frame(command)[:5])
    reader.feed_eof()
    assert await read_frame(reader, env_worker_pb2.WorkerCommand) == command
    assert await read_frame(reader, env_worker_pb2.WorkerCommand) is None


@pytest.mark.parametrize(
    ("data", "reason"), [(b"\xff\xff\xff\xff", "FRAME_TOO_LONG"), (b"\x02\0\0\0\xff\xff", "FRAME_UNREADABLE")]
)
async def test_broken_frames(data: bytes, reason: str) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    with pytest.raises(CorruptObjectError) as caught:
        await read_frame(reader, env_worker_pb2.WorkerCommand)
    assert caught.value.reason == reason


def test_describe_exit() -> None:
    assert [describe_exit(code) for code in (17, -9, 0)] == ["exit code 17", "killed by SIGKILL", "exit code 0"]


# Finding environments.


@pytest.mark.parametrize(
    ("env_id", "module"), [("reverse-text", "reverse_text"), ("owner/reverse-text@1.2", "reverse_text"), ("x", "x")]
)
def test_module_name(env_id: str, module: str) -> None:
    assert environment_module(env_id) == module


def test_unknown_module_says_how_it_was_looked_up() -> None:
    with pytest.raises(NotFoundError) as caught:
        adapter.load_adapter(EnvSpec(id="surely-no-such-env"))
    for text in ("'surely-no-such-env'", "'surely_no_such_env'", "pip install"):
        assert text in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "{", '"x"', "3"])
def test_args_must_be_an_object(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="must be a JSON object"):
        adapter.parse_args(EnvSpec(id="e", args_json=text))


# Settings, imports.


def test_settings() -> None:
    environ = {"MILLRACE_ENV_WORKERS": "2", "MILLRACE_ENV_CAPACITY": "7", "MILLRACE_SPOOL_BYTES": "1000"}
    assert EnvServerSettings.from_env(environ) == EnvServerSettings(num_workers=2, capacity=7, spool_bytes=1000)
    wrong = {"MILLRACE_ENV_WORKERS": "0", "MILLRACE_ENV_CAPACITY": "x", "MILLRACE_SPOOL_BYTES": "2 GiB"}
    with pytest.raises(InvalidSpecError) as caught:
        EnvServerSettings.from_env(wrong | {"MILLRACE_SPOOL_DIR": "spool"})
    assert {violation.field for violation in caught.value.violations} == {*wrong, "MILLRACE_SPOOL_DIR"}


def test_a_spool_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    good = tmp_path / "new" / "spool"
    assert EnvServerSettings.from_env({"MILLRACE_SPOOL_DIR": str(good)}).spool_dir == good
    with pytest.raises(InvalidSpecError, match=rf"MILLRACE_SPOOL_DIR: must be a directory, and {tmp_path}/file is"):
        EnvServerSettings.from_env({"MILLRACE_SPOOL_DIR": str(tmp_path / "file" / "spool")})


@pytest.mark.computes
def test_the_service_never_imports_verifiers() -> None:
    code = (
        "import sys, millrace.env_server.run, millrace.env_server.service\n"
        "heavy = {'verifiers', 'transformers', 'datasets', 'openai', 'renderers', 'torch'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"MILLRACE_ENV_VISIBLE": "/usr"}, "is used only with MILLRACE_ENV_ISOLATION=container, which is process"),
        ({"MILLRACE_ENV_ISOLATION": "user"}, "MILLRACE_ENV_USER: must name the user that workers run as"),
        ({"MILLRACE_ENV_ISOLATION": "user", "MILLRACE_ENV_USER": "no-such-user"}, "is no user of this machine"),
        ({"MILLRACE_ENV_ISOLATION": "user", "MILLRACE_ENV_USER": "0"}, "must be another user than root"),
        ({"MILLRACE_ENV_USER": "nobody"}, "is used only with MILLRACE_ENV_ISOLATION=user, which is process"),
        ({"MILLRACE_ENV_ISOLATION": "none", "MILLRACE_ENV_CONNECT_PORTS": "8000"}, "needs MILLRACE_ENV_ISOLATION="),
    ],
)
def test_an_isolation_that_cannot_be_kept_is_refused(environ: dict[str, str], says: str) -> None:
    settings = EnvServerSettings.from_env(environ)
    with pytest.raises(InvalidSpecError) as caught:
        settings.confinement()
    assert says in str(caught.value) and caught.value.reason == "SETTINGS_INVALID"


def test_what_a_container_hides_and_its_workers_need_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tempfile.mkdtemp(dir="/tmp")
    link = tmp_path / "link"
    link.symlink_to(place)
    assert covered(VisibleFiles(shown=("/usr", place, "/tmp/no-such-directory"))) == [place]
    monkeypatch.setattr("millrace.env_server.isolation.namespaces._OWN", (place,))
    assert covered(VisibleFiles(shown=("/usr", str(link)))) == [str(link)], "where it leads to"
    monkeypatch.setenv("PYTHONPATH", place)
    environ = {"MILLRACE_ENV_ISOLATION": "container"} | ({"MILLRACE_ENV_USER": "nobody"} if os.geteuid() == 0 else {})
    with pytest.raises(InvalidSpecError, match=f"workers need {place}, and see a private directory.*Install Python"):
        EnvServerSettings.from_env(environ).confinement()
    os.rmdir(place)


def test_a_container_that_cannot_be_made_is_refused_and_a_user_where_root_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_settings, "covered", lambda _: [])
    monkeypatch.setattr(own_settings, "why_no_container", lambda _: "mount proc at /proc: Operation not permitted")
    monkeypatch.setattr(own_settings.namespaces, "is_administrator", lambda: False)
    settings = EnvServerSettings.from_env({"MILLRACE_ENV_ISOLATION": "container"})
    with pytest.raises(InvalidSpecError, match=r"cannot be kept here: mount proc .* Level .* keeps out less"):
        settings.confinement()
    monkeypatch.setattr(own_settings, "why_no_container", lambda _: "")
    assert settings.confinement().is_container
    monkeypatch.setattr(own_settings.namespaces, "is_administrator", lambda: True)
    with pytest.raises(InvalidSpecError, match="MILLRACE_ENV_USER: must name the user that workers run as"):
        settings.confinement()


def test_what_a_container_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("redis", "envs", "secrets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    environ = {
        "PYTHONPATH": f"{tmp_path}/envs",
        "MILLRACE_SPOOL_DIR": "/var/spool/x",
        "MILLRACE_STORE_URL": "file:///var/store",
        "MILLRACE_REDIS_URL_FILE": f"{tmp_path}/redis/file",
        "MILLRACE_WORKER_TOKEN_FILE": f"{tmp_path}/envs/file",
        "MILLRACE_TLS_CA": f"{tmp_path}/secrets/file",
        "MILLRACE_ENV_VISIBLE": f"{tmp_path}/envs",
    }
    visible = visible_to_workers(environ, ["/data"])
    assert {"/usr", "/data", f"{tmp_path}/envs", sys.prefix} <= set(visible.shown)
    assert str(tmp_path) not in visible.shown, "where the env-server was started is its own business"
    assert not {"/", "/home", "/root", "/etc", "/var", "/run", "/tmp"} & set(visible.shown)
    hidden = {"/var/spool/x", "/var/store", f"{tmp_path}/redis/file", f"{tmp_path}/redis", f"{tmp_path}/envs/file"}
    assert set(visible.hidden) == {*hidden, f"{tmp_path}/secrets/file"}
    given = visible.with_shown([f"{tmp_path}/secrets/file"])
    assert set(given.hidden) == hidden and f"{tmp_path}/secrets/file" in given.shown
    assert VisibleFiles.from_json(json.loads(json.dumps(given.to_json()))) == given


def test_isolation_settings() -> None:
    environ = {
        "MILLRACE_ENV_MEMORY_BYTES": "1000",
        "MILLRACE_ENV_MAX_FILES": "0",
        "MILLRACE_ENV_CONNECT_PORTS": "80,443",
    }
    settings = EnvServerSettings.from_env(environ)
    assert settings.isolation is Isolation.PROCESS and settings.connect_ports == (80, 443)
    assert (settings.memory_bytes, settings.max_files, settings.max_processes) == (1000, 0, 256)
    wrong = {
        "MILLRACE_ENV_ISOLATION": "vm",
        "MILLRACE_ENV_MEMORY_BYTES": "4 GiB",
        "MILLRACE_ENV_CONNECT_PORTS": "http",
        "MILLRACE_ENV_IDLE_S": "-1",
    }
    with pytest.raises(InvalidSpecError) as caught:
        EnvServerSettings.from_env(wrong)
    assert {violation.field for violation in caught.value.violations} == set(wrong)
    confined = Confinement(user=(7, 8), connect_ports=(80,), limits=WorkerLimits(memory_bytes=9))
    assert Confinement.from_json(json.loads(json.dumps(confined.to_json()))) == confined


def test_another_user_lets_nobody_into_spool_and_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_SCRATCH_DIR", str(tmp_path / "scratch"))
    settings = EnvServerSettings(spool_dir=tmp_path / "spool", isolation=Isolation.USER)
    settings.make_private()
    for name in ("spool", "scratch"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "left",
    [
        {"metrics": {"half a pair \ud83d": 1.0}},
        {"metrics": ["no names"]},
        {"stop_condition": "\ud83d"},
    ],
)
def test_a_member_is_answered_whatever_its_environment_left_in_its_outcome(left: dict[str, Any]) -> None:
    outcome = Outcome(status=RolloutStatus.OK, reward=1.0, **left)
    told = answer_of(request(), 1, "train/4", outcome, 2.0)
    assert (told.member, told.seconds, told.status) == (1, 2.0, rollout_pb2.ROLLOUT_STATUS_ENV_ERROR)
    assert "cannot be stored" in told.error.message


def test_a_play_that_is_too_large_for_a_frame_is_reported_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a report nobody would know that it is over."""
    fits = Outcome(status=RolloutStatus.OK, reward=1.0)
    large = Outcome(status=RolloutStatus.OK, reward=1.0, metrics={f"metric {number}": 1.0 for number in range(400)})
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 4000)
    statuses = []
    for outcomes in ([fits, fits], [fits, large]):
        frame = ended_frame(request(), 7, "train/4", outcomes, 2.0)
        ended = env_worker_pb2.WorkerReport.FromString(frame[4:]).ended  # after its length
        assert (ended.play_id, [each.member for each in ended.rollouts]) == (7, [0, 1])
        statuses.append({each.status for each in ended.rollouts})
    assert statuses == [{rollout_pb2.ROLLOUT_STATUS_OK}, {rollout_pb2.ROLLOUT_STATUS_ENV_ERROR}]
    assert all("too large to be reported" in each.error.message for each in ended.rollouts)
