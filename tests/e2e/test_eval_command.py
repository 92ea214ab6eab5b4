"""`millrace eval` against a second server: our own engine with a fixed model, after a door that checks an API key."""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from reverse_text import load_environment
from transformers import AutoTokenizer

from millrace.config.sections.data import LossMaskConfig
from millrace.local.directory import free_ports
from millrace.local.redis import die_with_parent
from millrace.readers.audit import audit_run
from millrace.storage import open_store
from millrace.trainer.sft.conversation import ConversationEncoder
from millrace.trainer.sft.rows import conversation_of
from millrace_testing.workplaces import Workplace

pytestmark = [pytest.mark.long, pytest.mark.timeout(280)]

KEY = "key-that-nobody-may-see-7f3a"
NUM_TASKS, PER_TASK = 24, 2
EVAL = f"""
num_examples = {NUM_TASKS}
rollouts_per_example = {PER_TASK}
max_concurrent = 6
[model]
name = "fixed"
[sampling]
max_tokens = 12
[client]
api_key_var = "DOOR_KEY"
[[env]]
id = "reverse-text"
args = {{ num_train = 50, num_eval = {NUM_TASKS} }}
"""


class Door:
    """A gateway as endpoints have one: a key, a limit of requests, sometimes a bad gateway."""

    def __init__(self, behind: str) -> None:
        self.behind = behind
        self.answers: Counter[int] = Counter()
        self.url = ""
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._stop = asyncio.Event()

    def __enter__(self) -> "Door":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        async with aiohttp.ClientSession() as self._session:
            await self._stop.wait()
        await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.Response:
        status, body = await self._answer(request)
        self.answers[status] += 1
        return web.json_response(body, status=status, headers={"Retry-After": "0.3"} if status == 429 else {})

    async def _answer(self, request: web.Request) -> tuple[int, dict]:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return 401, {"error": {"message": "who are you"}}
        body = await request.json()
        if "return_token_ids" in body or "logprobs" in body:
            return 400, {"error": {"message": "unknown argument"}}  # as strict endpoints say
        number = next(self._numbers)
        if number < 2:
            return 429, {"error": {"message": "slow down"}}
        if number == 7:
            return 502, {"error": {"message": "bad gateway"}}
        await asyncio.sleep(0.4)  # so that the run lasts long enough to lose its orchestrator
        async with self._session.post(f"{self.behind}/chat/completions", json=body) as reply:
            answer = await reply.json()
        for choice in answer["choices"]:
            for name in ("token_ids", "policy_spans", "logprobs"):
                choice.pop(name, None)
        answer.pop("prompt_token_ids", None)
        return reply.status, answer


@pytest.fixture
def fixed_engine(warm: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the base URL of an engine that serves the warmed-up model by itself, without an orchestrator."""
    port, http_port = free_ports(2)
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with log.open("w") as output:
        process = warm.popen(
            *("-m", "millrace.inference.main"),
            stdout=output,
            preexec_fn=die_with_parent,
            env={
                "MILLRACE_MODEL": str(warm.path / "outputs" / "reverse-text" / "sft" / "model"),
                "MILLRACE_MODEL_NAME": "fixed",
                "MILLRACE_LISTEN": f"127.0.0.1:{port}",
                "MILLRACE_HTTP_LISTEN": f"127.0.0.1:{http_port}",
                "MILLRACE_DRAIN_S": "0",
            },
        )
    try:
        wait_models(f"http://127.0.0.1:{http_port}/v1", process, log)
        yield f"http://127.0.0.1:{http_port}/v1"
    finally:
        process.terminate()
        process.wait(20)


def wait_models(url: str, process: subprocess.Popen, log: Path) -> None:
    async def is_there() -> bool:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(f"{url}/models") as reply:
                    return reply.status == 200
            except aiohttp.ClientError:
                return False

    ends = time.monotonic() + 90
    while not asyncio.run(is_there()):
        assert process.poll() is None and time.monotonic() < ends, log.read_text()[-2000:]
        time.sleep(0.2)


def test_an_endpoint_is_evaluated_although_its_orchestrator_dies(
    warm: Workplace, make_workplace, fixed_engine: str
) -> None:
    place = make_workplace("eval")
    (place.path / "eval.toml").write_text(EVAL)
    with Door(fixed_engine) as door:
        argv = ("eval", "@", "eval.toml", "--client.base-url", door.url, "--name", "outside")
        code, said = place.attempt("-m", "millrace.cli", *argv)
        assert code == 2 and "DOOR_KEY" in said and "is not set" in said, said
        with place.following(*argv, env={"DOOR_KEY": KEY}) as process:
            stack = wait_played(place, door, process)
            os.kill(stack["pids"]["orchestrator"], signal.SIGKILL)
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        directory = place.path / "outputs" / "outside"
        data = json.loads((directory / "eval.json").read_text())
        found = data["envs"]["reverse-text"]
        assert (found["num_rollouts"], found["num_failed"]) == (NUM_TASKS * PER_TASK, 0)
        assert 0.2 < found["reward_mean"] < 1 and 0 < found["reward_sem"] < 0.2
        assert 0 <= found["pass@1"] <= found["pass@2"] <= 1
        assert found["endpoint_retries_mean"] == pytest.approx(3 / (NUM_TASKS * PER_TASK))
        assert f"± {found['reward_sem']:.3f}" in output and "pass@2" in output
        assert "the endpoint did not serve a request" in (directory / "logs" / "env-server.log").read_text()
        # What the log held when the orchestrator died was not played again.
        assert door.answers == {200: NUM_TASKS * PER_TASK, 429: 2, 502: 1}
        assert "ORCHESTRATOR_REPLACED" in output or "reconnecting" in output
    seen = [path for path in place.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert seen == [], "the key was written down"
    audit(stack["store"], data["uid"], NUM_TASKS * PER_TASK)


def wait_played(place: Workplace, door: Door, process: subprocess.Popen) -> dict:
    """Return what the stack says of itself once a third of the rollouts came back."""
    ends = time.monotonic() + 150
    while door.answers[200] < NUM_TASKS * PER_TASK // 3:
        assert process.poll() is None and time.monotonic() < ends, process.communicate(timeout=30)[0]
        time.sleep(0.05)
    return json.loads((place.path / "outputs" / "outside" / "stack.json").read_text())


def audit(store_url: str, uid: str, num_rollouts: int) -> None:
    """The run's log is clean, and its archive holds every rollout, from the store alone."""

    report = asyncio.run(audit_run(None, open_store(store_url), prefix="millrace", uid=uid))
    assert [f"{found.check}: {found.message}" for found in report.violations] == []
    assert report.num_rollouts == num_rollouts


@pytest.fixture
def transformers_server(warm: Workplace, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Yield the base URL of `transformers serve`, and the name of the warmed-up model that it serves."""
    model = warm.path / "outputs" / "reverse-text" / "sft" / "model"
    (port,) = free_ports(1)
    program = "from transformers.cli.transformers import main; main()"
    served = ("serve", str(model), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port))
    log = tmp_path / "serve.log"
    with log.open("w") as output:
        process = warm.popen(
            "-c", program, *served, stdout=output, preexec_fn=die_with_parent, env={"HF_HUB_OFFLINE": "1"}
        )
    try:
        wait_answering(port, process, log)
        yield f"http://127.0.0.1:{port}/v1", str(model)
    finally:
        process.terminate()
        process.wait(20)


def test_the_server_of_transformers_is_evaluated(make_workplace, transformers_server: tuple[str, str]) -> None:
    place, (url, model) = make_workplace("eval-transformers"), transformers_server
    place.millrace(
        *("eval", "--environment-ids", "reverse-text", "--model.name", model),
        *("--client.base-url", url, "--sampling.max-tokens", "12"),
        *("--num-examples", "6", "--rollouts-per-example", "2", "--max-concurrent", "2", "--name", "other"),
    )
    data = json.loads((place.path / "outputs" / "other" / "eval.json").read_text())
    found = data["envs"]["reverse-text"]
    assert (found["num_rollouts"], found["num_failed"]) == (12, 0)
    low, high = found["pass@1/ci95"]
    assert 0 < found["reward_mean"] < 1 and low <= found["pass@1"] <= high
    shown = place.millrace("eval", "show", "other", "-o", "json").strip().splitlines()
    assert len(shown) == 12


def test_a_model_is_trained_on_rollouts_of_the_server_of_transformers(
    make_workplace, transformers_server: tuple[str, str]
) -> None:
    place, (url, model) = make_workplace("train-on-transformers"), transformers_server
    place.millrace(
        *("eval", "--tasks", "train", "--environment-ids", "reverse-text", "--model.name", model),
        *("--client.base-url", url, "--sampling.max-tokens", "24"),
        *("--num-examples", "8", "--rollouts-per-example", "2", "--max-concurrent", "2", "--name", "sampled"),
    )
    records = [
        json.loads(line)
        for line in place.millrace("eval", "show", "sampled", "-o", "json").splitlines()
        if line.startswith("{")
    ]
    lines = place.millrace("eval", "show", "sampled", "-o", "sft").splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(records) == 16 and rows == [{"messages": each["messages"]} for each in records if is_whole(each)]
    assert rows, "the warmed-up model ends its replies by itself"
    prompts = {task["question"] for task in load_environment().get_dataset()}
    assert {row["messages"][-2]["content"] for row in rows} <= prompts, "they are the training tasks"
    (place.path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_tokens(rows, model)
    output = place.millrace(
        *("sft", "--model.name", model, "--data.name", "rows.jsonl", "--data.batch-size", str(len(rows))),
        *("--max-steps", "6", "--optim.lr", "1e-3", "--scheduler.warmup-steps", "0", "--name", "copied"),
    )
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[-1] < 0.7 * losses[0], output


def check_tokens(rows: list[dict], model: str) -> None:
    """Trained are the reply's tokens and the end, after exactly the prompt that the server was sent."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = ConversationEncoder(tokenizer, LossMaskConfig())
    for row in rows:
        token_ids, trained = encoder.encode(conversation_of(row))
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        reply = tokenizer(row["messages"][-1]["content"], add_special_tokens=False)["input_ids"]
        chosen = [token for token, flag in zip(token_ids, trained, strict=True) if flag]
        assert token_ids[: len(prompt)] == prompt and trained.index(True) == len(prompt)
        assert chosen == [*reply, tokenizer.eos_token_id]


def is_whole(record: dict) -> bool:
    """Return whether the model has ended its reply by itself."""
    return record["status"].lower() == "ok" and not record["truncated"] and bool(record["messages"][-1]["content"])


def wait_answering(port: int, process: subprocess.Popen, log: Path) -> None:
    ends = time.monotonic() + 90
    while "Uvicorn running" not in log.read_text():
        assert process.poll() is None and time.monotonic() < ends, log.read_text()[-2000:]
        time.sleep(0.2)


SMALL = [
    *("--orchestrator.batch-size", "32", "--orchestrator.rollouts-per-example", "8", "--max-steps", "2"),
    *("--orchestrator.eval.num-examples", "4"),
]


def interrupt(process: subprocess.Popen) -> str:
    """Return what the command says after a Ctrl-C; it has to end in time and as interrupted."""
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    return said


@pytest.mark.timeout(600)  # four stacks, one after the other
def test_the_policies_of_a_run_are_compared_and_an_interrupted_comparison_goes_on(warm: Workplace) -> None:
    warm.train(*SMALL, "--name", "trained")
    compare = ["eval", "--run", "trained", "--steps", "2", "--environment-ids", "reverse-text", "--name", "compared"]
    compare += ["--sampling.max-tokens", "12", "--num-examples", "6", "--rollouts-per-example", "2"]
    with warm.following(*compare) as process:
        warm.read_until(process, "base: runs/compared-base")
        assert "--name compared --resume" in interrupt(process)
    with warm.following(*compare, "--resume") as process:
        warm.read_until(process, "step-2: runs/compared-step-2")
        said = interrupt(process)
    (advice,) = [line for line in said.splitlines() if "--resume" in line]
    assert advice == "interrupted; to go on, give the same command with --name compared --resume"
    root = warm.path / "outputs"
    base = json.loads((root / "compared-base" / "eval.json").read_text())
    code, refused = warm.attempt("-m", "millrace.cli", *compare)
    assert code == 2 and "outputs/compared exists already" in refused and "--resume" in refused
    code, refused = warm.attempt("-m", "millrace.cli", *compare, "--resume", "--num-examples", "7")
    assert code == 2 and "other settings: num_examples" in refused
    output = warm.millrace(*compare, "--resume")
    assert "base: evaluated before" in output and "step-2: evaluated before" not in output
    data = json.loads((root / "compared" / "eval.json").read_text())
    assert [(each["policy"], each["step"]) for each in data["policies"]] == [("base", None), ("step-2", 2)]
    assert data["policies"][0]["envs"] == base["envs"]
    assert len({each["uid"] for each in data["policies"]}) == 2
    assert all(each["envs"]["reverse-text"]["num_rollouts"] == 12 for each in data["policies"])
    assert (root / "compared" / "eval.png").is_file()
    assert not list((root / "compared" / "policies").iterdir()), "weights are removed once they are evaluated"
    assert warm.processes() == []


@pytest.mark.timeout(500)  # three stacks, one after the other
def test_an_interrupted_evaluation_goes_on_with_what_was_played(warm: Workplace) -> None:
    tasks, per_task = 300, 2
    env = json.dumps([{"id": "reverse-text", "args": {"num_train": 50, "num_eval": tasks}}])
    command = ["eval", "--env", env, "--model.name", str(warm.path / "outputs" / "reverse-text" / "sft" / "model")]
    command += ["--sampling.max-tokens", "12", "--num-examples", str(tasks), "--rollouts-per-example", str(per_task)]
    command += ["--max-concurrent", "1", "--name", "cut"]
    with warm.following(*command) as process:
        warm.read_until(process, "played ")
        assert "give the same command with --name cut --resume" in interrupt(process)
    directory = warm.path / "outputs" / "cut"
    assert not (directory / "eval.json").exists()
    output = warm.millrace(*command, "--resume", "--max-concurrent", "64")
    assert "going on with runs/cut" in output
    data = json.loads((directory / "eval.json").read_text())
    found = data["envs"]["reverse-text"]
    assert (found["num_rollouts"], found["num_failed"]) == (tasks * per_task, 0)
    audit((directory / "store").as_uri(), data["uid"], tasks * per_task)
    assert warm.processes() == []
