"""The mistakes: a sentence, the command, and what has to be there before it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file

from millrace.local.directory import free_ports
from millrace.rpc.tokens import new_token, token_line

Prepare = Callable[[Path], object]

RL = "rl @ examples/reverse_text/rl.toml"
SFT = "sft @ examples/reverse_text/sft.toml"
SMALL = (
    " --max-steps 2 --orchestrator.batch-size 32 --orchestrator.rollouts-per-example 8"
    " --orchestrator.eval.num-examples 4 --orchestrator.eval.skip-first-step"
)
MODEL = Path("outputs/reverse-text/sft/model")
DONE = "done"
"""A run that has SUCCEEDED, in the place where the mistakes are made."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake. `prepare` is called in the place; what it returns is closed, if it can be, after the command."""

    what: str
    command: str
    """After `millrace`."""
    prepare: Prepare = lambda place: None
    env: Mapping[str, str] = field(default_factory=dict)
    answer: str = "Error:"
    """How the line begins that tells it; `note:` says what will come of it, and is no error."""
    limit_s: float = 60.0


def _write(name: str, text: str) -> Prepare:
    return lambda place: (place / name).write_text(text)


def _model(name: str, *left_out: str, change: Callable[[Path], object] = lambda model: None) -> Prepare:
    """Return a step that copies the trained model without some of its files."""

    def make(place: Path) -> None:
        copy = place / name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(place / MODEL, copy, ignore=shutil.ignore_patterns(*left_out))
        change(copy)

    return make


def _without_template(model: Path) -> None:
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))


def _not_finite(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = next(iter(tensors))
    tensors[name] = tensors[name].float() * float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def _cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


@contextmanager
def taken_port() -> Iterator[int]:
    """Listen on a port of this machine and yield its number."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset
def load_environment():
{body}
    rows = Dataset.from_list([{{"question": "a", "answer": "b"}}] * 64)
    def hard(completion, {argument}) -> float:
        {reward}
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[hard]))
"""
ENVIRONMENT_V1 = """
import verifiers.v1 as vf
__all__ = ["WantsTaskset"]
class WantsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def hard(self, trace: vf.Trace, difficulty: int) -> float:
        return 1.0
class WantsTaskset(vf.Taskset[WantsTask, vf.TasksetConfig]):
    def load(self):
        return [WantsTask(vf.TaskData(idx=i, prompt="a"), self.config.task) for i in range(64)]
"""


def _environment(name: str, *, body: str = "    pass", argument: str = "answer", reward: str = "return 1.0") -> Prepare:
    return _write(f"{name}.py", ENVIRONMENT.format(body=body, argument=argument, reward=reward))


def env(name: str, **args: object) -> str:
    """Return the option that names one environment."""
    return f" --orchestrator.env '{json.dumps([{'id': name, 'args': args}])}'"


def _rows(name: str, rows: list[dict[str, str]]) -> Prepare:
    return _write(name, "".join(json.dumps(row) + "\n" for row in rows))


_PAIR = {"prompt": "a", "completion": "b"}

CONFIGS = (
    Mistake(what="a key is misspelt", command=f"{RL} --trainer.optim.lrr 1"),
    Mistake(what="a value of another kind", command=f"{RL} --trainer.optim.lr fast"),
    Mistake(what="a name of TRL's", command=f"{RL} --num_generations 8"),
    Mistake(what="the config file is not there", command="rl @ rl.tmol"),
    Mistake(
        what="the config file is malformed",
        command="rl @ malformed.toml",
        prepare=_write("malformed.toml", "max_steps = 3\nseq_len 64\n"),
    ),
    Mistake(what="a config of `sft` given to `rl`", command="rl @ examples/reverse_text/sft.toml"),
    Mistake(what="a group of one rollout", command=f"{RL} --orchestrator.rollouts-per-example 1"),
    Mistake(what="a batch that is not whole groups", command=f"{RL} --orchestrator.batch-size 100"),
    Mistake(what="a seed beyond 64 bits", command=f"{RL} --seed 99999999999999999999 --dry-run"),
    Mistake(
        what="all steps are warm-up",
        command=f"{RL} --max-steps 3 --trainer.scheduler.warmup-steps 3 --dry-run --set-only",
        answer="note:",
    ),
    Mistake(what="a prompt has no room", command=f"{RL} --seq-len 8{SMALL}"),
    Mistake(what="a GPU that is not there", command=f"{RL} --trainer-gpu-ids '[0]'{SMALL}"),
    Mistake(what="vLLM, which is not installed", command=f"{RL} --inference.engine vllm{SMALL}"),
)
MODELS = (
    Mistake(what="a model's path is wrong", command=f"{RL} --model.name outputs/nobody"),
    Mistake(
        what="a model without a tokenizer",
        command=f"{RL} --model.name m-tokenizer{SMALL}",
        prepare=_model("m-tokenizer", "tokenizer*", "vocab*", "merges*", "special*", "chat_template*"),
    ),
    Mistake(
        what="a model without a chat template",
        command=f"{RL} --model.name m-template{SMALL}",
        prepare=_model("m-template", "chat_template*", change=_without_template),
    ),
    Mistake(
        what="a model's weights are cut off",
        command=f"{RL} --model.name m-cut{SMALL}",
        prepare=_model("m-cut", change=_cut),
    ),
    Mistake(
        what="a model's weights are not numbers",
        command=f"{RL} --model.name m-nan{SMALL}",
        prepare=_model("m-nan", change=_not_finite),
    ),
)
DATA = (
    Mistake(what="the data is not there (SFT)", command=f"{SFT} --data.name rows.jsonl"),
    Mistake(
        what="a column is missing (SFT)",
        command=f"{SFT} --data.name columns.jsonl",
        prepare=_rows("columns.jsonl", [{"question": "a", "answer": "b"}] * 8),
    ),
    Mistake(
        what="no row fits the length (SFT)",
        command=f"{SFT} --data.name long.jsonl --data.seq-len 4",
        prepare=_rows("long.jsonl", [{"prompt": "a" * 60, "completion": "b"}] * 8),
    ),
    Mistake(
        what="a row is malformed (SFT)",
        command=f"{SFT} --data.name torn.jsonl",
        prepare=_write("torn.jsonl", json.dumps(_PAIR) + '\n{"prompt": "a", "compl\n'),
    ),
)
ENVIRONMENTS = (
    Mistake(what="the environment is not there", command=f"{RL}{SMALL}{env('reverse-txt')}"),
    Mistake(
        what="a reward wants what is not passed (v0)",
        command=f"{RL}{SMALL}{env('wants')}",
        prepare=_environment("wants", argument="difficulty"),
    ),
    Mistake(
        what="a reward wants what is not passed (v1)",
        command=f"{RL}{SMALL}{env('wants-v1')}",
        prepare=_write("wants_v1.py", ENVIRONMENT_V1),
    ),
    Mistake(
        what="the environment raises when it loads",
        command=f"{RL}{SMALL}{env('raises')}",
        prepare=_environment("raises", body='    {}["rows"]'),
    ),
    Mistake(
        what="arguments that it does not have",
        command=f"{RL}{SMALL}{env('takes-none', level=3)}",
        prepare=_environment("takes_none"),
    ),
    Mistake(
        what="the reward raises",
        command=f"{RL}{SMALL}{env('reward-raises')}",
        prepare=_environment("reward_raises", reward="return 1 / 0"),
    ),
    Mistake(
        what="the reward is no number",
        command=f"{RL}{SMALL}{env('reward-nan')}",
        prepare=_environment("reward_nan", reward='return float("nan")'),
    ),
)
PLACES = (
    Mistake(
        what="the output directory is a file",
        command=f"{RL}{SMALL} --output-dir a-file/x",
        prepare=_write("a-file", ""),
    ),
    Mistake(what="an output directory that cannot be written", command=f"{RL}{SMALL} --output-dir /proc/x"),
    Mistake(what="the same (SFT)", command=f"{SFT} --output-dir /proc/x"),
    Mistake(what="a wrong Redis address", command=f"{RL}{SMALL}", env={"MILLRACE_REDIS_URL": "redis://127.0.0.1:1/0"}),
    Mistake(
        what="a wrong store address",
        command=f"{RL}{SMALL}",
        env={
            "MILLRACE_STORE_URL": "s3://bucket?endpoint=http://127.0.0.1:1",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
        },
    ),
    Mistake(what="a store that is no URL", command=f"{RL}{SMALL}", env={"MILLRACE_STORE_URL": "bucket/prefix"}),
)
COMMANDS = (
    Mistake(what="no server runs", command="run submit @ examples/reverse_text/rl.toml"),
    Mistake(what="a wrong server address", command="run list --server 127.0.0.1:1"),
    Mistake(what="an address that is none", command="run list --server localhost"),
    Mistake(what="a token's file is not there", command="run list --token-file nobody.token --server 127.0.0.1:1"),
    Mistake(what="a run that is not there", command="run why nobody"),
    Mistake(what="a run begun a second time", command=f"{RL}{SMALL} --name {DONE}"),
    Mistake(what="resume of a run that is not there", command=f"{RL}{SMALL} --name nobody --resume"),
    Mistake(what="resume of a run that has succeeded", command=f"run resume {DONE}"),
    Mistake(what="cancel of a run that has ended", command=f"run cancel {DONE}"),
    Mistake(
        what="an evaluation of a step that is not there",
        command=f'eval --run {DONE} --steps 99 --env \'[{{"id": "reverse-text"}}]\'',
    ),
    Mistake(
        what="an evaluation of a run that is not there",
        command='eval --run nobody --steps 1 --env \'[{"id": "reverse-text"}]\'',
    ),
    Mistake(what="samples of a run that is not there", command="run samples nobody"),
    Mistake(what="a fork of a step that is not there", command=f"{RL}{SMALL} --name {DONE} --ckpt.resume-step 99"),
    Mistake(what="a command that there is not", command="run wathc done"),
)


class CannotBeMade(Exception):
    """This machine does not allow the mistake, such as a mount by somebody who is not root."""


class Running:
    """A program that has written `until`; `close` interrupts it, and waits for its end."""

    def __init__(self, argv: list[str], place: Path, *, until: str, env: Mapping[str, str] | None = None) -> None:
        log = place / f"{Path(argv[-1]).name}.out"
        with log.open("w") as out:
            self._process = subprocess.Popen(
                argv, cwd=place, stdout=out, stderr=out, env=clean_environ(env or {}), start_new_session=True
            )
        deadline = time.monotonic() + 120
        while until not in log.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{argv} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)

    def close(self) -> None:
        """End it, by force if it does not."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Several(list[Running]):
    """Programs that are ended together."""

    def close(self) -> None:
        """End them, the last one first."""
        while self:
            self.pop().close()


class Mounted:
    """A file system of a few pages in memory; `close` takes it away."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
        try:
            done = subprocess.run(mount, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise CannotBeMade("there is no `mount`") from error
        if done.returncode:
            raise CannotBeMade(done.stderr.strip())

    def close(self) -> None:
        """Unmount the file system."""
        subprocess.run(["umount", str(self._directory)], check=True)


def clean_environ(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without settings of Millrace's and S3's, and with `more`."""
    left = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "AWS_"))}
    return {**left, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


S3, GUARDED, GUARDED_HTTP, FIRST, FIRST_HTTP, SECOND, SECOND_HTTP, SHARED, SHARED_HTTP = free_ports(9)


def _up(place: Path, name: str, port: int, http_port: int, env: Mapping[str, str] | None = None) -> Running:
    up = [sys.executable, "-m", "millrace.cli", "up", "--listen", f"127.0.0.1:{port}", "--http-port", str(http_port)]
    return Running([*up, "--dir", f"outputs/{name}"], place, until="export MILLRACE_SERVER=", env=env)


def _checking_store(place: Path) -> Running:
    """Start an S3 server that checks credentials from the first request on."""
    argv = [str(Path(sys.executable).with_name("moto_server")), "--host=127.0.0.1", f"--port={S3}"]
    return Running(argv, place, until="Running on", env={"INITIAL_NO_AUTH_ACTION_COUNT": "0"})


def _guarded(place: Path) -> Running:
    """Start a stack that demands tokens, and write a token that it does not know."""
    (place / "tokens").write_text(token_line(new_token(), "somebody") + "\n")
    (place / "wrong.token").write_text(new_token() + "\n")
    (place / "wrong.token").chmod(0o600)
    return _up(place, "guarded", GUARDED, GUARDED_HTTP, {"MILLRACE_TOKENS_FILE": str(place / "tokens")})


def _two_stacks(place: Path) -> Several:
    return Several([_up(place, "first", FIRST, FIRST_HTTP), _up(place, "second", SECOND, SECOND_HTTP)])


def _cancelled(place: Path) -> Running:
    """Start a stack with a run that is being cancelled."""
    stack = _up(place, "shared", SHARED, SHARED_HTTP)
    server = clean_environ({"MILLRACE_SERVER": f"127.0.0.1:{SHARED}"})
    submit = ["run", "submit", "@", "examples/reverse_text/rl.toml", "--name", "twice", "--max-steps", "500"]
    for words in (submit, ["run", "cancel", "twice"]):
        subprocess.run([sys.executable, "-m", "millrace.cli", *words], cwd=place, check=True, stdout=2, env=server)
    return stack


LENT = (
    Mistake(
        what="a disk that is full",
        command=f"{RL}{SMALL} --output-dir full",
        prepare=lambda place: Mounted(place / "full"),
    ),
    Mistake(
        what="wrong credentials of the store",
        command=f"{RL}{SMALL}",
        prepare=_checking_store,
        env={
            "MILLRACE_STORE_URL": f"s3://bucket?endpoint=http://127.0.0.1:{S3}",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
        },
    ),
    Mistake(
        what="a wrong token",
        command=f"run list --token-file wrong.token --server 127.0.0.1:{GUARDED}",
        prepare=_guarded,
    ),
    Mistake(what="several servers, and none is named", command="run list", prepare=_two_stacks),
    Mistake(
        what="cancel a second time",
        command=f"run cancel twice --server 127.0.0.1:{SHARED}",
        prepare=_cancelled,
        answer="runs/",
    ),
)
"""Those that need something beside them: a file system, a server, stacks."""
ALL = (*CONFIGS, *MODELS, *DATA, *ENVIRONMENTS, *PLACES, *COMMANDS, *LENT)
