"""The embedded engine's HTTP API under concurrent requests: tokens/s and processor seconds of the server.

    python benchmarks/http_api.py [--quick] [--before DIR] [--concurrency 64] [--rounds 5]

A server in a process of its own serves the tiny model of `engine.py`; this process asks over loopback, for whole
answers and for streams, of 64 tokens and of one (where the API is all of the work). `--before` names the `services`
directory of another checkout, whose server is measured in turns with this one, round by round, so that both see the
same machine. Figures are medians of the rounds. The full run takes three minutes on two cores; --quick twenty seconds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from report import REPOSITORY, progress, table

KINDS = {"whole, 64 tokens": (False, 64), "streamed, 64 tokens": (True, 64)}
KINDS |= {"whole, 1 token": (False, 1), "streamed, 1 token": (True, 1)}
START_S = 120.0
ANSWER_S = 120.0


def make_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)


async def serve(directory: Path) -> None:
    """The server's process: prints its port, serves until stdin ends."""
    try:
        from millrace.inference.embedded.engine import EmbeddedEngine
        from millrace.inference.http.server import HttpApi, start_http
    except ModuleNotFoundError:  # a checkout from before the rooms, whose server is aiohttp's
        from millrace.inference.server import HttpApi, start_http  # type: ignore[no-redef]

        from millrace.inference.embedded import EmbeddedEngine  # type: ignore[no-redef]
    from millrace.inference.model_files import ModelSlot
    from millrace.inference.updater import PolicyUpdater

    sys.setswitchinterval(0.0005)  # as the replica does
    engine, slot = EmbeddedEngine(), ModelSlot()
    await PolicyUpdater(engine, slot, None, None).serve_fixed(directory)
    started = await start_http(HttpApi(engine, slot), "127.0.0.1", 0)
    # A checkout before the server was uvicorn's gives aiohttp's runner and the port.
    print(started[1] if isinstance(started, tuple) else started.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


@contextlib.contextmanager
def server(services: Path, directory: Path) -> Iterator[tuple[int, int]]:
    """Port and pid of a server that runs the code of `services`."""
    command = [sys.executable, __file__, "--serve", str(directory)]
    environ = {**os.environ, "PYTHONPATH": str(services), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, pid: int, *, concurrency: int, requests: int, kind: str) -> tuple[float, float]:
    """Tokens per second, and the server's processor milliseconds per request."""
    is_streamed, num_tokens = KINDS[kind]
    body = {
        "messages": [{"role": "user", "content": "turn me around, please"}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        "stream": is_streamed,
    }
    data = json.dumps(body).encode()
    left = requests
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def ask() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                async with session.post("/v1/chat/completions", data=data) as answer:
                    text = await answer.read()
                    assert answer.status == 200 and text, text
                    assert not is_streamed or text.endswith(b"data: [DONE]\n\n")

        began, used = time.monotonic(), cpu_s(pid)
        await asyncio.gather(*(ask() for _ in range(concurrency)))
        took = time.monotonic() - began
    return requests * num_tokens / took, 1000 * (cpu_s(pid) - used) / requests


async def run(trees: dict[str, Path], *, concurrency: int, rounds: int, requests: int) -> str:
    from engine import make_model  # imports this checkout's engine, which a server of another one does not have

    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        place = Path(directory)
        make_model().save_pretrained(place)
        make_tokenizer(place)
        servers = {name: stack.enter_context(server(services, place)) for name, services in trees.items()}
        for turn in range(rounds + 1):  # the first one warms up
            for kind, (_, num_tokens) in KINDS.items():
                count = requests if num_tokens > 1 else 4 * requests
                for name in sorted(servers, reverse=bool(turn % 2)):
                    port, pid = servers[name]
                    got = await measure(port, pid, concurrency=concurrency, requests=count, kind=kind)
                    progress(f"{kind}, {name}: {got[0]:.0f} tokens/s, {got[1]:.2f} ms")
                    if turn:
                        found.setdefault((kind, name), []).append(got)
            progress(f"round {turn} of {rounds}")
    rows = [
        [
            kind,
            name,
            f"{statistics.median(rate for rate, _ in got):.0f}",
            f"{statistics.median(ms for _, ms in got):.2f}",
        ]
        for (kind, name), got in found.items()
    ]
    return table(["answers", "server", "tokens/s", "CPU ms per request"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--before", type=Path, help="directory `services` of another checkout")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve))
        return
    trees = {"this": REPOSITORY / "services"} | ({"before": args.before} if args.before else {})
    rounds, requests = (1, 64) if args.quick else (args.rounds, 256)
    print(f"## HTTP API, {args.concurrency} concurrent requests\n")
    print(asyncio.run(run(trees, concurrency=args.concurrency, rounds=rounds, requests=requests)))


if __name__ == "__main__":
    main()
