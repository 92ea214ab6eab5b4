"""An engine that answers every request at once with the same tokens: what is left is the cost of whoever asks.

    python benchmarks/scripted_engine.py --port PORT [--prompt 64] [--tokens 32] [--whole]

It speaks what env workers ask of an engine: chat completions with exact tokens, log-probs and policy spans, several
choices of one chat line by line (`rollouts.choices_wire`; `--whole` leaves them out, as stock vLLM does), token ids
through `/inference/v1/generate`, and the list of models. Answers are made once, so an answer costs it about 0.1 ms.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import httptools
import uvloop

from millrace.rollouts import parameters

MODEL = "policy"
MAX_MODEL_LEN = 40_960
TOKEN, LAST = 65, 258  # of the demo's vocabulary: a letter, and the end of a turn


def _reply(body: bytes, *, kind: str = "application/json", can_stream: bool = False) -> bytes:
    """A whole HTTP answer."""
    more = f"{parameters.HEADER}: {parameters.LINES}\r\n" if can_stream else ""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{more}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Answers:
    """All answers, as bytes."""

    def __init__(self, *, num_prompt: int, num_tokens: int, is_whole: bool) -> None:
        token_ids = [*[TOKEN] * (num_tokens - 1), LAST]
        logprobs = [{"token": f"token_id:{i}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for i in token_ids]
        shared: dict[str, Any] = {
            "index": 0,
            "token_ids": token_ids,
            "finish_reason": "stop",
            "logprobs": {"content": logprobs},
            "policy_spans": [{"lineage": 0, "version": 0, "start": 0, "end": num_tokens}],
        }
        message = {"role": "assistant", "content": chr(TOKEN) * (num_tokens - 1)}
        chat = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "prompt_token_ids": [TOKEN] * num_prompt,
            "choices": [{**shared, "message": message}],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt + num_tokens,
            },
        }
        self._is_whole = is_whole
        self._lines = [
            json.dumps({"index": index, "status": 200, "body": chat}).encode() + b"\n"
            for index in range(parameters.MAX_CHOICES)
        ]
        self._chat = _reply(json.dumps(chat).encode(), can_stream=not is_whole)
        self._generated = _json_reply({"request_id": "g", "choices": [shared]})
        self._models = _json_reply({"object": "list", "data": [{"id": MODEL, "max_model_len": MAX_MODEL_LEN}]})

    def to(self, path: bytes, body: bytes) -> bytes:
        """The answer to one request."""
        if path.endswith(b"/generate"):
            return self._generated
        if path.endswith(b"/models"):
            return self._models
        if not self._is_whole and parameters.FIELD.encode() in body:
            lines = b"".join(self._lines[: json.loads(body)["n"]])
            return _reply(lines, kind=parameters.CONTENT_TYPE, can_stream=True)
        return self._chat


def _json_reply(body: Mapping[str, Any]) -> bytes:
    return _reply(json.dumps(body).encode())


class Connection(asyncio.Protocol):
    """One client's connection, kept alive."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", bytearray()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._transport.write(self._answers.to(self._path, bytes(self._body)))
        self._body.clear()


async def serve(port: int, answers: Answers) -> None:
    """Until the process is ended."""
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(answers), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of every prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of every completion")
    parser.add_argument("--whole", action="store_true", help="send no choices one by one")
    options = parser.parse_args()
    answers = Answers(num_prompt=options.prompt, num_tokens=options.tokens, is_whole=options.whole)
    uvloop.run(serve(options.port, answers))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
