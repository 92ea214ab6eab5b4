"""Bounds of HTTP requests that both engines share, and the body bound before vLLM's server."""

import json

import pytest

from millrace.errors import InvalidSpecError
from millrace.inference.http import access
from millrace.inference.http.access import TokenGate
from millrace.rpc.access import ServerAccess


@pytest.mark.parametrize(
    ("prompt", "n", "words"),
    [
        (["a"] * 257, 1, "257 prompts"),
        ([[1]] * 257, 1, "257 prompts"),
        (["a"] * 5, 128, "640 completions"),
        ("a" * 20_000, 1, "20000 characters"),
        (["b", "a" * 20_000], 1, r"prompt\[1\]"),
        ([1] * 1000, 1, "1000 tokens"),
        ([[1], [1] * 1000], 1, "1000 tokens"),
    ],
)
def test_prompts_that_are_too_much(prompt, n, words):
    with pytest.raises(InvalidSpecError, match=words):
        access.check_prompt(prompt, n, 1000)


@pytest.mark.parametrize("prompt", ["a" * 16_000, [1] * 999, ["a"] * 256, [[1], [2]], "", []])
def test_prompts_that_pass(prompt):
    access.check_prompt(prompt, 2, 1000)


def test_deep_values_are_refused_and_not_recursed():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidSpecError, match="nests deeper"):
        access.count_chars(deep)


async def ask(headers: list[tuple[bytes, bytes]], parts: list[bytes]) -> tuple[int, dict]:
    """Return what a gate before an application that reads the whole body answers; 499 for a client that has gone."""
    sent: list = []

    async def app(scope, receive, send) -> None:
        status = 200
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                status = 499
                break
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    messages = iter({"type": "http.request", "body": part, "more_body": True} for part in parts)

    async def receive():
        return next(messages, {"type": "http.request", "body": b"", "more_body": False})

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/completions", "headers": headers}
    await TokenGate(app, access=ServerAccess())(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_the_body_of_vllms_server_is_bounded():
    above = access.MAX_BODY_BYTES + 1
    status, body = await ask([(b"content-length", str(above).encode())], [])
    assert status == 413 and str(access.MAX_BODY_BYTES) in body["error"]["message"]
    assert (await ask([(b"content-length", b"5")], [b"12345"]))[0] == 200
    assert (await ask([], [bytes(1 << 20)] * 16))[0] == 200
    assert (await ask([], [bytes(1 << 20)] * 17))[0] == 499
