"""The cache of rendered chats: what it knows, and what it holds of what it was asked."""

import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from transformers import AddedToken

from millrace.inference.http import chat as prompt_cache
from millrace.inference.http.chat import PieceCache, PromptCache, encode_chat
from millrace_testing.inference import tiny


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


class Counting:
    """Counts the characters that a tokenizer encodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chars = 0
        encoded = prompt_cache.encode_text

        def counted(tokenizer: Any, text: str) -> list[int]:
            self.chars += len(text)
            return encoded(tokenizer, text)

        monkeypatch.setattr(prompt_cache, "encode_text", counted)


def turns(count: int) -> list[dict[str, Any]]:
    said = [("user", "ab \n c <|im_end|> é"), ("assistant", " d<|im_end|><|im_ ")]
    return [{"role": role, "content": f"{at}{text * 20}"} for at in range(count) for role, text in said]


def test_a_chat_that_grows_turn_by_turn_is_encoded_once_and_gives_the_tokens_of_its_whole_text(monkeypatch):
    tokenizer, pieces, counting = tiny.tiny_tokenizer(), PieceCache(), Counting(monkeypatch)
    messages, whole = turns(30), list[int]()
    for count in range(1, len(messages), 2):
        whole = encode_chat(tokenizer, messages[:count])
        assert encode_chat(tokenizer, messages[:count], pieces=pieces) == whole
    longest = len(tokenizer.decode(whole))
    # Once in pieces, and at most 2,048 characters or one more message whole for each of the first chats.
    assert counting.chars < 3 * longest, "each turn encodes what the turns before it have encoded"
    # No part is held twice: two parts a message, four bytes a token, and some bytes for the UTF-8 and headers.
    assert pieces.num_bytes <= 4 * len(whole) + 3 * longest + 600 * 2 * len(messages)


def test_pieces_are_of_one_tokenizer_and_bounded(monkeypatch):
    tokenizer, pieces = tiny.tiny_tokenizer(), PieceCache()
    monkeypatch.setattr(prompt_cache, "_MAX_PIECE_BYTES", 5000)
    whole = encode_chat(tokenizer, turns(30))
    assert encode_chat(tokenizer, turns(30), pieces=pieces) == whole
    assert 0 < pieces.num_bytes <= 5000
    assert pieces.can_cut(tiny.tiny_tokenizer()) and pieces.num_bytes == 0


def test_the_bound_counts_texts_and_parts_as_well_as_tokens(monkeypatch):
    tokenizer, pieces = tiny.tiny_tokenizer(), PieceCache()
    monkeypatch.setattr(prompt_cache, "encode_text", lambda tokenizer, text: [])
    assert pieces.can_cut(tokenizer)
    pieces.encode(tokenizer, "<|im_start|>" + "a" * 10_000 + "<|im_start|>" + "b" * 10_000)
    assert pieces.num_bytes >= 20_000, "two long texts without a token"
    before = pieces.num_bytes
    pieces.encode(tokenizer, "".join(f"<|im_start|>{at}" for at in range(1000)))
    assert pieces.num_bytes - before >= 400_000, "a thousand short ones"
    monkeypatch.setattr(prompt_cache, "_MAX_PIECE_BYTES", 50_000)
    pieces.encode(tokenizer, "<|im_start|>" + "c" * 10_000)
    assert 10_000 <= pieces.num_bytes <= 50_000
    held = pieces.num_bytes
    pieces.encode(tokenizer, "<|im_start|>" + "d" * 60_000)
    assert pieces.num_bytes == held, "one that does not fit drops no other"


@pytest.mark.parametrize("more", ["lstrip", "rstrip", "single_word", "normalized"])
def test_a_token_that_takes_what_is_beside_it_is_no_place_to_cut(more):
    tokenizer: Any = tiny.tiny_tokenizer()
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}

    class Told(type(tokenizer)):
        added_tokens_decoder: ClassVar = {1: SimpleNamespace(content="<|a|>", **plain | {more: True})}

    tokenizer.__class__ = Told
    assert not PieceCache().can_cut(tokenizer)
    Told.added_tokens_decoder = {1: SimpleNamespace(content="<|a|>", **plain)}
    assert PieceCache().can_cut(tokenizer)
    Told.added_tokens_decoder[2] = SimpleNamespace(content="x<", **plain | {"special": False})
    assert not PieceCache().can_cut(tokenizer), "x<|a|> is cut into x< and |a|>"


@pytest.mark.parametrize("first", ["\u200d", "\u0301", "_", "a", " ", "\u00ab"])
def test_a_text_is_cut_only_before_ascii_punctuation(first):
    tokenizer: Any = tiny.tiny_tokenizer()
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}

    class Marked(type(tokenizer)):
        added_tokens_decoder: ClassVar = {1: SimpleNamespace(content=f"{first}<a>", **plain)}

    tokenizer.__class__ = Marked
    assert not PieceCache().can_cut(tokenizer), "a token of whole words before it may end there only if it is cut"


def test_a_token_of_whole_words_beside_a_joiner_is_the_same_token_in_pieces():
    tokenizer, pieces = tiny.tiny_tokenizer(), PieceCache()
    tokenizer.add_tokens(["\u200d<a>"], special_tokens=True)
    tokenizer.add_tokens([AddedToken("foo", single_word=True, normalized=False)])
    rendered = "<|im_start|>user\n" + "foo\u200d<a> foo <|im_end|>\n" * 200
    assert pieces.can_cut(tokenizer)
    assert pieces.encode(tokenizer, rendered) == prompt_cache.encode_text(tokenizer, rendered)
    assert pieces.can_cut(tokenizer) and pieces.num_bytes > 0


def test_a_thousand_special_tokens_cost_next_to_nothing():
    tokenizer, pieces = tiny.tiny_tokenizer(), PieceCache()
    tokenizer.add_tokens([f"<SPECIAL_{at}>" for at in range(500)], special_tokens=True)
    tokenizer.add_tokens([f"[CONTROL_{at}]" for at in range(500)], special_tokens=True)
    begun = time.process_time()
    assert pieces.can_cut(tokenizer)
    assert time.process_time() - begun < 1.0, "each token was compared with each"

    code = "if (a[0] <b> c) { d[<i>] = '<SPECIAL_x>'; } // [CONTROL_] \u00e9\n"
    rendered = "".join(f"<SPECIAL_{at}>{code * 45}[CONTROL_{at}]" for at in range(40))
    assert len(rendered) > 100_000
    assert pieces.encode(tokenizer, rendered) == prompt_cache.encode_text(tokenizer, rendered)
    begun = time.process_time()
    again = pieces.encode(tokenizer, rendered)
    assert time.process_time() - begun < 0.5, "each character was compared with each token"
    assert again == prompt_cache.encode_text(tokenizer, rendered)
    assert pieces.can_cut(tokenizer)


def test_a_chat_of_the_tokenizer_before_proves_nothing_of_the_next_one(monkeypatch):
    old, new, pieces = tiny.tiny_tokenizer(), tiny.tiny_tokenizer(), PieceCache()
    encoded = prompt_cache.encode_text
    rendered = "<|im_start|>user\n" + "a" * 3000 + "<|im_end|>"

    def encode_text(tokenizer: Any, text: str) -> list[int]:
        if tokenizer is old and text == rendered:
            assert pieces.can_cut(new), "replaced while the last chat of the old one is encoded"
        return [7] * (tokenizer is new) + encoded(tokenizer, text)

    monkeypatch.setattr(prompt_cache, "encode_text", encode_text)
    assert pieces.can_cut(old)
    assert pieces.encode(old, rendered) == encoded(old, rendered)
    assert pieces.num_bytes == 0, "the old one's parts are not the new one's"
    assert pieces.encode(new, rendered) == [7, *encoded(new, rendered)]
    assert not pieces.can_cut(new)


def test_a_text_that_gives_other_tokens_in_pieces_is_encoded_whole_from_then_on(monkeypatch, caplog):
    tokenizer, pieces = tiny.tiny_tokenizer(), PieceCache()
    encoded = prompt_cache.encode_text
    monkeypatch.setattr(prompt_cache, "encode_text", lambda tokenizer, text: [7, *encoded(tokenizer, text)])
    rendered = "<|im_start|>user\n" + "a" * 3000 + "<|im_end|>"
    assert pieces.can_cut(tokenizer)
    assert pieces.encode(tokenizer, rendered) == [7, *encoded(tokenizer, rendered)]
    assert not pieces.can_cut(tokenizer) and "encoded whole" in caplog.text
