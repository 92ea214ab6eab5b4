"""Every kind of bad input at the real command: what is wrong, where, what to do, and the exit code."""

import json
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.cli.errors import report
from millrace.client import SyncClient
from millrace.errors import AlreadyExistsError
from millrace.v1 import run_pb2

pytestmark = pytest.mark.long

FAULTY = Path(__file__).resolve().parents[1] / "fixtures" / "environments" / "faulty_v0"


def rl(workplace, *argv: str, **options) -> tuple[int, str]:
    code, output = workplace.attempt("-m", "millrace.cli", "rl", "@", workplace.rl_toml, *argv, **options)
    assert "Traceback" not in output
    return code, output


def environments(*specs: dict) -> list[str]:
    return ["--orchestrator.env", json.dumps(specs)]


# Before anything starts: the command line alone knows.


def test_wrong_key(warm) -> None:
    code, output = rl(warm, "--trainer.optim.lrr", "1")
    assert code == 2
    assert "trainer.optim.lrr" in output and "did you mean `trainer.optim.lr`" in output and "(got 1)" in output
    assert "at: command line (--trainer.optim.lrr)" in output


def test_batch_size_not_divisible(warm) -> None:
    code, output = rl(warm, "--orchestrator.batch-size", "100")
    assert code == 2
    assert "orchestrator.batch_size" in output and "(got 100)" in output
    assert "must be a multiple of `orchestrator.rollouts_per_example`, which is 16; use 96 or 112" in output
    assert "at: command line (--orchestrator.batch-size)" in output


def test_model_path_does_not_exist(warm) -> None:
    code, output = rl(warm, "--model.name", "outputs/nobody")
    assert code == 2
    assert f"model.name: does not exist in {warm.path} (got outputs/nobody)" in output
    assert "at: command line (--model.name)" in output
    assert "remedy: make it first, for example with `millrace sft @" in output


# Before the services start.


def test_port_in_use(warm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = rl(warm, "--inference.server.port", str(port))
        assert code == 5
        assert f"port {port} on 127.0.0.1 is in use; it is needed for the inference engine's HTTP API" in output
        assert "remedy: end the program that listens there" in output and "--inference.server.port" in output
        code, output = warm.attempt("-m", "millrace.cli", "up", "--listen", f"127.0.0.1:{port}")
        assert code == 5 and f"port {port} on 127.0.0.1 is in use" in output and "--listen" in output
    assert warm.processes() == []


def test_redis_unreachable(warm) -> None:
    code, output = rl(warm, env={"MILLRACE_REDIS_URL": "redis://user:hunter22@127.0.0.1:1/0"})
    assert code == 5
    assert "127.0.0.1:1/0 (MILLRACE_REDIS_URL) does not answer" in output and "hunter22" not in output
    assert "remedy: start it, or correct MILLRACE_REDIS_URL" in output
    assert warm.processes() == []


def test_store_unreachable(warm) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "hunter22"}
    code, output = rl(warm, env={"MILLRACE_STORE_URL": "s3://bucket?endpoint=http://127.0.0.1:1", **keys})
    assert code == 5
    assert "127.0.0.1:1" in output and "(MILLRACE_STORE_URL) does not answer" in output and "hunter22" not in output
    assert "remedy: start it, or correct MILLRACE_STORE_URL" in output
    assert warm.processes() == []


# What only a service finds out: one stack for all of them.


@pytest.fixture(scope="module")
def server(warm) -> Iterator[dict[str, str]]:
    with warm.up(env={"PYTHONPATH": str(FAULTY)}) as address:
        yield {"MILLRACE_SERVER": address}
    assert warm.processes() == [], "failed runs leave nothing behind"


def test_unknown_environment(warm, server) -> None:
    code, output = rl(warm, *environments({"id": "reverse-txt"}), "--name", "unknown", env=server)
    assert code == 1
    assert "Error: runs/unknown failed: environment 'reverse-txt'" in output
    looked = f"'reverse-txt' was not found: no Python module 'reverse_txt' in {warm.path} and its venv "
    assert looked in output, "where it was looked for"
    assert "remedy: put reverse_txt.py into this directory of the env-server" in output
    assert "at: env-server [ENV_LOAD_FAILED], details: millrace run why unknown" in output


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"id": "faulty-v0", "args": {"load_raises": True}}, "KeyError: 'no such thing while loading' (at "),
        ({"id": "faulty-v0", "args": {"load_exits": True}}, "the environment's process ended while loading: exit code"),
    ],
)
def test_load_environment_raises(warm, server, env: dict, text: str) -> None:
    code, output = rl(warm, *environments(env), env=server)
    assert code == 1
    assert f"failed: environment '{env['id']}'" in output and text in output
    assert "at: env-server [ENV_LOAD_FAILED], details: millrace run why faulty-v0-" in output
    assert output.count("environment's args") <= 1 and output.count(text) == 1, "once"
    assert "` goes on with the run" in output


def test_load_environment_raises_on_a_stack_of_its_own(warm) -> None:
    """The same without a server: the stack is torn down, and the error says how to go on without one."""
    code, output = rl(warm, *environments({"id": "reverse-text", "args": {"num_train": -1}}), "--run.name", "raises")
    assert code == 1
    assert "got -1 and 64" in output and "in load_environment" in output
    assert "correct the environment's args (orchestrator.env.args)" in output
    assert "at: env-server [ENV_LOAD_FAILED], its log: outputs/raises/logs/env-server.log" in output
    assert "the same command with --name raises --resume goes on with the run" in output


@pytest.mark.parametrize(
    ("config", "problem", "remedy", "reason"),
    [
        ("{damaged", "config.json cannot be used", "copy, download or make the model again", "MODEL_FILE_UNUSABLE"),
        (
            '{"model_type": "nonsense"}',
            "cannot be loaded: its config.json does not load",
            "set model.name to a directory with config.json, tokenizer and *.safetensors",
            "MODEL_NOT_FOUND",
        ),
    ],
)
def test_damaged_model(warm, server, config: str, problem: str, remedy: str, reason: str) -> None:
    damaged = warm.path / "outputs" / "damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(warm.path / "outputs" / "reverse-text" / "sft" / "model", damaged)
    (damaged / "config.json").write_text(config)
    code, output = rl(warm, "--model.name", "outputs/damaged", env=server)
    assert code == 1
    assert str(damaged) in output and problem in output and remedy in output
    assert f"at: trainer [{reason}]" in output


def test_second_create_with_the_same_request_id(warm, server, capsys) -> None:
    there = ("--server", server["MILLRACE_SERVER"])  # where the environment may be installed
    printed = (
        warm.millrace(
            "rl", "@", warm.rl_toml, "--dry-run", "--max-steps", steps, *environments({"id": "nobody"}), *there
        )
        for steps in ("1", "2")
    )
    config, other = (text[text.index("{") :] for text in printed)  # notes about them come first
    request_id = str(uuid.uuid4())
    with SyncClient(server["MILLRACE_SERVER"]) as client:
        before = len(client.runs.list())
        first = client.runs.create(config, request_id=request_id)
        again = client.runs.create(config, request_id=request_id)
        assert (again.name, again.uid) == (first.name, first.uid), "a retry creates no second run"
        with pytest.raises(AlreadyExistsError) as caught:
            client.runs.create(other, request_id=request_id)
        list(client.runs.watch(first.name))
        assert client.runs.get(first.name).state == run_pb2.RUN_STATE_FAILED
        assert len(client.runs.list()) == before + 1
    error = caught.value
    assert error.reason == "REQUEST_ID_REUSED" and request_id in error.message
    assert f"was used for run {first.name.removeprefix('runs/')!r} with another config" in error.message
    assert report(error, is_debug=False) == 2, "the command line's exit code"
    assert "remedy: use a new request_id for a new run" in capsys.readouterr().err


def test_the_stack_still_works_after_all_that(warm, server) -> None:
    summary, _ = warm.train(
        *("--max-steps", "1", "--orchestrator.batch-size", "32", "--orchestrator.rollouts-per-example", "8"),
        *("--orchestrator.eval.num-examples", "4"),
        env=server,
    )
    assert summary["steps"] == 1
