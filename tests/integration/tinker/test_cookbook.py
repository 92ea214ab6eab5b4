"""Recipes of the public tinker-cookbook against our server, each of whose processes is killed twice meanwhile."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from millrace.internal.v1 import tinker_pb2 as pb
from millrace.storage.local import LocalStore
from millrace.tinker.executor import VerbExecutor
from millrace.tinker.log import ModelLog
from millrace.tinker.names import ModelName
from millrace.tinker.training import SharedBase, base_digest
from millrace_testing.polling import block_until
from millrace_testing.tinker import ANSWER_S, Server

pytestmark = pytest.mark.timeout(1500)

ROOT = Path(__file__).parents[3]
RECIPE = Path(__file__).with_name("cookbook_recipe.py")
LIMIT_S = 1200
MODEL = "Qwen/Qwen3-8B"
# The example's byte tokenizer, with the tokens of the cookbook's renderer for Qwen3, and an untrained model.
MAKE = """
import sys
from make_model import make_model, make_tokenizer
tokenizer = make_tokenizer()
tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<think>", "</think>"]})
for place in ("base", sys.argv[1]):
    tokenizer.save_pretrained(place)
make_model(tokenizer, seed=0, heads=4).save_pretrained("base")
"""
CHATS = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"hello {n}"}] for n in range(8)]
DATA = {
    "openai/gsm8k": ("main", [{"question": f"what is {n}?", "answer": "so #### 72"} for n in range(8)]),
    "HuggingFaceH4/no_robots": ("default", [{"prompt": "hi", "messages": chat} for chat in CHATS]),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a base model, and with the tokenizer and the data where the recipes look for them."""
    place = tmp_path_factory.mktemp("cookbook")
    example = f"{ROOT / 'examples' / 'reverse_text'}:{ROOT / 'environments' / 'reverse_text'}"
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": example, "HOME": str(place)}
    subprocess.run([sys.executable, "-c", MAKE, MODEL], cwd=place, env=environ, check=True, timeout=300)
    for name, (config, rows) in DATA.items():
        folder = place / name
        folder.mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        files = ""
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text(lines)
            files += f"  - split: {split}\n    path: {split}.jsonl\n"
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    return place


def run_recipe(python: Path, server: Server, kind: str, workplace: Path, log: Path) -> list[dict[str, Any]]:
    """Run a recipe to its end, and return what it logged of its steps."""
    environ = {"PATH": "/usr/bin:/bin", "TINKER_API_KEY": "tml-none", "TINKER_TELEMETRY": "0", "HOME": str(workplace)}
    environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), str(RECIPE), server.url, kind, str(log)],
        cwd=workplace, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def executed_again(server: Server, directory: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the results of the store's one model, and those that its requests give in an unbroken executor."""
    store = LocalStore(server.store)
    [folder] = server.store.glob("*/tinker/*/*/train-*")
    prefix, session = folder.parts[-5], folder.parts[-2]
    name = ModelName.parse(prefix, "", f"{session}:train:0")
    log = ModelLog(store, name)
    last = next(n for n in range(10_000) if log.verb(n) is None)
    before = [log.result(n) for n in range(last)]
    for kind in ("results", "states", "checkpoints"):
        for info in list(store.list(f"{name.root}{kind}/")):
            store.delete(info.key)
    base = SharedBase(directory)
    digest = base_digest(directory)
    executor = VerbExecutor(store, base, base_digest=digest, note=lambda message: None, snapshot_verbs=10_000)
    executor.look(name)
    while executor.pause_s() is not None:
        executor.work()
    after = [log.result(n) for n in range(last)]

    def encoded(results: list[pb.VerbResult | None]) -> list[bytes]:
        return [b"" if each is None else each.SerializeToString(deterministic=True) for each in results]

    return encoded(before), encoded(after)


@pytest.mark.parametrize("kind", ["sl", "rl"])
def test_a_recipe_ends_through_kills_with_the_results_of_an_unbroken_server(
    kind: str, tinker_python: Path, workplace: Path, tmp_path: Path
) -> None:
    server = Server(tmp_path, workplace / "base", names=[MODEL])
    server.start()
    over = threading.Event()
    kills: list[str] = []

    def kill() -> None:
        for least, role in (
            (1, "trainer"),
            (2, "sampler"),
            (3, "server"),
            (5, "trainer"),
            (6, "sampler"),
            (7, "server"),
        ):
            block_until(lambda n=least: over.is_set() or server.results() >= n, timeout_s=ANSWER_S, poll_s=0.01)
            if over.is_set():
                return
            if role == "server":
                server.kill()
                server.start()
            else:
                server.kill_worker(role)
            kills.append(role)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        steps = run_recipe(tinker_python, server, kind, workplace, tmp_path / "log")
    finally:
        over.set()
        killer.join()
        server.stop()
    assert kills == ["trainer", "sampler", "server"] * 2
    if kind == "sl":
        losses = [step["train_mean_nll"] for step in steps if "train_mean_nll" in step]
        assert len(losses) == 4 and losses[-1] < losses[0]
    else:
        assert len(steps) >= 3
    before, after = executed_again(server, workplace / "base")
    assert before == after
