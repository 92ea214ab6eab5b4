"""A model that says the same thing every time: an OpenAI-compatible endpoint, to try an environment with."""

import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

NAME = "stub"
_LOOPBACK = "127.0.0.1"


@contextlib.asynccontextmanager
async def stub_model(reply: str) -> AsyncIterator[str]:
    """Serve it, and give its base URL."""

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answer = _answer(reply, is_chunk=bool(body.get("stream")))
        if not body.get("stream"):
            return web.json_response(answer)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode())
        return stream

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "millrace"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, _LOOPBACK, 0).start()
        yield f"http://{_LOOPBACK}:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def _answer(reply: str, *, is_chunk: bool) -> dict[str, Any]:
    message = {"role": "assistant", "content": reply}
    choice = {"index": 0, "delta" if is_chunk else "message": message, "finish_reason": "stop"}
    return {
        "id": "stub",
        "object": "chat.completion.chunk" if is_chunk else "chat.completion",
        "created": int(time.time()),
        "model": NAME,
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
