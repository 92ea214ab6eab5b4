"""A chat whose tokens were made for a model that is replaced before they come to the engine."""

import asyncio
import threading
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import UnavailableError
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import PolicyIdentity
from millrace.inference.http import server
from millrace.inference.http.schema import ChatBody
from millrace.inference.http.server import HttpApi
from millrace.inference.model_files import ModelSlot, ServedModel
from millrace_testing.inference import tiny


@pytest.mark.parametrize("stream_choices", [False, True])
async def test_tokens_of_one_model_are_never_given_to_another(
    model_dir: Path,
    make_model: Callable[[int], Any],
    make_staged: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
    stream_choices: bool,
) -> None:
    """The answer would name a version of the other run, and its tokens are of another tokenizer."""
    is_encoding, may_end = threading.Event(), threading.Event()

    def encode(*_: Any, **__: Any) -> list[int]:
        is_encoding.set()
        assert may_end.wait(60)
        return [1, 2, 3]

    def served() -> ServedModel:
        return ServedModel(names=("policy",), directory=model_dir, tokenizer=tiny.tiny_tokenizer())

    monkeypatch.setattr(server, "encode_chat", encode)
    engine, slot = EmbeddedEngine(max_num_seqs=4), ModelSlot()
    await engine.load(model_dir, make_staged(make_model(0)), identity=PolicyIdentity(run_uid="a", lineage=0, version=3))
    slot.current = served()
    api = HttpApi(engine, slot)
    body = ChatBody(messages=[{"role": "user", "content": "long " * 350}], max_tokens=4, stream_choices=stream_choices)
    monkeypatch.setattr(server, "_SMALL", 100)  # else a chat of that size were encoded before anything could happen
    chat = asyncio.create_task(api.chat(body))
    assert await asyncio.to_thread(is_encoding.wait, 60)
    slot.current = None  # as the updater loads the policy of another run
    await engine.load(model_dir, make_staged(make_model(1)), identity=PolicyIdentity(run_uid="b", lineage=0, version=0))
    slot.current = served()
    may_end.set()
    if stream_choices:
        sent: list[bytes] = []
        await (await chat)({}, _never, partial(_note, sent))
        assert b'"status":503' in b"".join(sent) and b"replaced" in b"".join(sent)
    else:
        with pytest.raises(UnavailableError, match="replaced"):
            await chat
    assert engine.status().num_generated_tokens == 0
    await engine.close()


async def _never() -> MutableMapping[str, Any]:
    return await asyncio.get_running_loop().create_future()


async def _note(sent: list[bytes], message: MutableMapping[str, Any]) -> None:
    sent.append(message.get("body", b""))
