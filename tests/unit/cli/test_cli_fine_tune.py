"""`millrace sft` as a child process: its exit code, its output, and Ctrl-C."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace.cli.session import fine_tune
from millrace.processes import table
from millrace_testing.model_files import make_qwen3, write_tokenizer

pytestmark = pytest.mark.computes

# Stands in for the trainer: prints what it was given and does what the config's number of steps says.
TRAINER = """
import json, sys, time
config = json.load(open(sys.argv[-1]))
import os
rank = os.environ.get("RANK")
print("training", config["max_steps"], sys.argv[-1], flush=True)
if rank and config["max_steps"] == 8:  # the second rank dies
    os.kill(os.getpid(), 9) if rank == "1" else time.sleep(600)
if rank and config["max_steps"] == 9:  # both refuse the config
    time.sleep(1 - int(rank))
    sys.exit(2)
if rank and config["max_steps"] == 10:
    print(rank, *(os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")))
if config["max_steps"] == 7:
    sys.exit(7)
if config["max_steps"] == 600:
    time.sleep(600)
"""

COMMAND = """
import sys
from millrace.cli.session import fine_tune
from millrace.cli.main import main
fine_tune.TRAINER = ("-c", {trainer!r}, "sft", "--config")
sys.exit(main(["sft", *sys.argv[1:]]))
"""


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(trainer=TRAINER), *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("flag", [("--server", "h:1"), ("--resume",), ("--follow",), ("--name", "Not A Name")])
def test_flags_that_it_would_not_heed_are_refused(flag, capsys):
    assert main(["sft", "--model.name", "gpt2", *flag, "--dry-run"]) == 2
    assert flag[0] in capsys.readouterr().err


def test_a_dry_run_looks_at_the_first_rows_of_local_files(tmp_path, capsys):
    data, other = tmp_path / "rows.jsonl", tmp_path / "val"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 300 + "{")  # not looked at so far
    flags = ["sft", "--model.name", "gpt2", "--dry-run", "--data.name", str(data), "--val.data.name", str(other)]
    assert main(flags) == 0
    said = capsys.readouterr()
    assert '"columns"' in said.out and f"note: val.data.name: there is no {other} on this machine" in said.err
    other.mkdir()
    assert main(flags) == 3 and "it is empty" in capsys.readouterr().err
    (other / "a.jsonl").write_text('{"question": "a"}\n')
    assert main([*flags, "--val.data.columns.prompt", "question"]) == 2
    said = capsys.readouterr()
    assert not said.out and "val.data.name: needs `messages`" in said.err and f"at: {other}/a.jsonl:1" in said.err
    assert main(["sft", "--model.name", "gpt2", "--dry-run", "--data.name", "owner/data-2.5"]) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a model whose template writes messages as words, and their ends."""
    directory = make_qwen3(tmp_path_factory.mktemp("model"), is_tied=True)
    return write_tokenizer(directory, num_tokens=48)


def messages(answer: str) -> str:
    said = [{"role": "user", "content": "t1"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": said}) + "\n"


def test_a_dry_run_encodes_the_first_rows_for_a_local_model(tmp_path, capsys, model):
    """What a run would refuse of all its rows is refused; of more rows than are looked at it is a note."""
    data = tmp_path / "rows.jsonl"
    flags = ["sft", "--model.name", str(model), "--dry-run", "--data.name", str(data), "--data.seq-len", "8"]
    data.write_text(messages("t2 t3") * 3)
    assert main(flags) == 0 and "note" not in capsys.readouterr().err
    data.write_text(messages("t2 t3") * 19 + messages("t2 " * 20))
    assert main(flags) == 0
    assert "of the first 20 rows 1 are cut at data.seq_len = 8; the longest has 23 tokens" in capsys.readouterr().err
    refused = messages("t2 t47 t3")
    data.write_text(messages("t2") + refused)
    assert main(flags) == 2
    said = capsys.readouterr()
    assert not said.out and "(1 of 2 rows cannot be used)" in said.err and f"{data}:2" in said.err
    data.write_text(refused * 300)
    assert main(flags) == 0
    assert "note: data: of the first 256 rows: data.name: " in capsys.readouterr().err
    data.write_text(messages("t2"))
    other = tmp_path / "val.jsonl"
    other.write_text(refused)
    assert main([*flags, "--val.data.name", str(other)]) == 2 and f"{other}:1" in capsys.readouterr().err


def test_a_dry_run_of_rl_encodes_the_first_rows_of_its_dataset(tmp_path, capsys, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    data = tmp_path / "rows.jsonl"
    flags = ["rl", "--orchestrator.env", '[{"id": "a"}]', "--model.name", str(model), "--dry-run", "--seq-len", "16"]
    flags += ["--orchestrator.sampling.max-tokens", "8", "--group-size", "2", "--trainer.dataset.name", str(data)]
    assert main(flags) == 0
    assert f"note: trainer.dataset: there is no {data} on this machine" in capsys.readouterr().err
    data.write_text(messages("t2 t3") * 19 + messages("t2 " * 20))
    assert main(flags) == 0
    said = capsys.readouterr()
    assert "of the first 20 rows 1 are cut at trainer.model.seq_len = 16; the longest has 23 tokens" in said.err
    assert json.loads(said.out)["trainer"]["dataset"]["rows_per_step"] == 16
    data.write_text(messages("t2") + messages("t2 t47 t3"))
    assert main(flags) == 2
    said = capsys.readouterr()
    assert not said.out and "trainer.dataset.name: " in said.err and f"{data}:2" in said.err


def test_output_and_exit_code_are_the_trainers(tmp_path):
    process = start(tmp_path, "--model.name", "gpt2", "--max-steps", "3", "--run.name", "warm")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "training 3 outputs/warm/config.json\n", "")
    process = start(tmp_path, "--model.name", "gpt2", "--max-steps", "3", "--name", "other")
    assert process.communicate(timeout=60) == ("training 3 outputs/other/config.json\n", "")
    process = start(tmp_path, "--model.name", "gpt2", "--max-steps", "7")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 7 and out.startswith("training 7 outputs/sft-gpt2-")


@dataclass
class Ended:
    """A rank that has ended before anybody waits for it."""

    exited: asyncio.Future[int]
    is_alive: bool = False


@pytest.mark.parametrize(("codes", "expected"), [((7,), 7), ((0, 0), 0), ((2, 2), 2)])
async def test_a_rank_that_ended_before_it_is_waited_for_counts(codes, expected):
    ranks = [Ended(asyncio.get_running_loop().create_future()) for _ in codes]
    for rank, code in zip(ranks, codes, strict=True):
        rank.exited.set_result(code)
    async with asyncio.timeout(5):
        assert await fine_tune.wait_for_ranks(ranks) == expected


def test_several_ranks_are_told_who_they_are_and_the_first_is_heard(tmp_path):
    arguments = ("--model.name", "gpt2", "--run.name", "warm", "--nproc-per-node", "2")
    process = start(tmp_path, *arguments, "--max-steps", "10")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines() == ["training 10 outputs/warm/config.json", "0 0 2 2 127.0.0.1"]
    assert (tmp_path / "outputs/warm/logs/trainer-rank-1.log").read_text().splitlines()[1] == "1 1 2 2 127.0.0.1"


def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path):
    arguments = ("--model.name", "gpt2", "--run.name", "warm", "--nproc-per-node", "2")
    process = start(tmp_path, *arguments, "--max-steps", "8")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 died: signal SIGKILL" in err and "logs/trainer-rank-1.log" in err
    process = start(tmp_path, *arguments, "--max-steps", "9")
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (2, "")


def test_a_number_of_ranks_is_asked_for(tmp_path):
    process = start(tmp_path, "--model.name", "gpt2", "--nproc-per-node", "gpu")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "--nproc-per-node" in err and "1 or more" in err


def test_two_of_one_name_do_not_write_into_one_directory(tmp_path):
    arguments = ("--model.name", "gpt2", "--run.name", "warm", "--max-steps")
    first = start(tmp_path, *arguments, "600")
    try:
        assert first.stdout is not None and first.stdout.readline().startswith("training 600")
        second = start(tmp_path, *arguments, "3")
        out, err = second.communicate(timeout=60)
        assert (second.returncode, out) == (2, "") and f"(pid {first.pid}) runs in" in err
        assert '"max_steps":600' in (tmp_path / "outputs/warm/config.json").read_text()
    finally:
        first.kill()  # its trainer ends by itself, and is waited for
        first.communicate(timeout=60)
    third = start(tmp_path, *arguments, "3")
    out, _ = third.communicate(timeout=60)
    assert (third.returncode, out) == (0, "training 3 outputs/warm/config.json\n")


def test_ctrl_c_stops_the_trainer(tmp_path):
    process = start(tmp_path, "--model.name", "gpt2", "--max-steps", "600")
    assert process.stdout is not None and process.stdout.readline().startswith("training 600")
    trainer = next(
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if int(entry.name) != process.pid
        and str(tmp_path) == _cwd(entry)
        and b"--config" in (entry / "cmdline").read_bytes()
    )
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - began < 8
    assert not table.is_running(trainer)


def _cwd(entry: Path) -> str:
    try:
        return os.readlink(entry / "cwd")
    except OSError:
        return ""
