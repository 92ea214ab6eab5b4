"""The cache of rendered chats: what it knows, and what it holds of what it was asked."""

from types import SimpleNamespace

import pytest

from millrace.inference.http import chat as prompt_cache
from millrace.inference.http.chat import PromptCache


@pytest.fixture(autouse=True)
def _within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was rendered is forgotten with the minute, because some templates print the date."""
    monkeypatch.setattr(prompt_cache, "time", SimpleNamespace(time=lambda: 600.0))


def ask(cache: PromptCache, tokenizer: object, chat: object) -> list[int] | None:
    key, tokens = cache.get(tokenizer, chat)
    if tokens is None:
        cache.put(tokenizer, key, [1, 2])
    return tokens


def test_a_chat_is_known_until_the_tokenizer_is_another_one() -> None:
    cache, tokenizer = PromptCache(), object()
    chat = [[{"role": "user", "content": "\ud800 hi"}], None, True, False, {"enable_thinking": False}]
    assert ask(cache, tokenizer, chat) is None
    assert ask(cache, tokenizer, [*chat[:-1], {"enable_thinking": True}]) is None, "the template's variables count"
    assert ask(cache, tokenizer, chat) == [1, 2]
    assert ask(cache, object(), chat) is None


def test_a_large_request_with_few_tokens_is_not_held() -> None:
    cache, tokenizer = PromptCache(), object()
    key, _ = cache.get(tokenizer, [[{"role": "user", "content": "hi"}], None, {"unused": "x" * (1 << 20)}])
    assert len(key) < 200
