"""The tokens of chats that were rendered a moment ago: a group's members ask with the same messages.

Rendering and tokenizing a short chat costs as much CPU as all its decoding steps of a small model.
"""

import hashlib
import time
from collections import OrderedDict
from typing import Any

_VALID_S = 60  # some templates print the date
_MAX_CHATS = 1024
_MAX_TOKENS = 4 * 2**20  # 32 MiB of a list's pointers; the numbers themselves are shared or small


class PromptCache:
    """The newest chats of one tokenizer and their tokens. Of one thread."""

    def __init__(self) -> None:
        self._tokenizer: object = None
        self._chats: OrderedDict[str, list[int]] = OrderedDict()
        self._num_tokens = 0

    def get(self, tokenizer: object, chat: Any) -> tuple[str, list[int] | None]:
        """The chat's key, and its tokens if they are known. `chat` is everything that the rendering depends on."""
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._num_tokens = tokenizer, 0
            self._chats.clear()
        digest = hashlib.sha256(repr(chat).encode()).hexdigest()  # a chat may be as large as a body
        key = f"{int(time.time() / _VALID_S)} {digest}"
        tokens = self._chats.get(key)
        if tokens is not None:
            self._chats.move_to_end(key)
        return key, tokens

    def put(self, tokenizer: object, key: str, tokens: list[int]) -> None:
        """Keep a chat's tokens, unless the tokenizer was replaced while they were made."""
        if tokenizer is not self._tokenizer or key in self._chats:
            return
        self._chats[key] = tokens
        self._num_tokens += len(tokens)
        while len(self._chats) > _MAX_CHATS or self._num_tokens > _MAX_TOKENS:
            _, oldest = self._chats.popitem(last=False)
            self._num_tokens -= len(oldest)
