"""The text of single tokens, read from the `tokenizer.json` that is published with a policy; no tokenizer is needed."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import MillraceError
from millrace.policies.fetch import read_manifest
from millrace.runlog.names import Names
from millrace.runlog.records.listing import list_policies
from millrace.storage import ObjectStore
from millrace.storage.commit_points import newest_revision
from millrace.telemetry.redact import secret_spans

_FILE = "tokenizer.json"
_MAX_BYTES = 64 << 20
_SPACE = "▁"  # what SentencePiece writes for a space


class Vocabulary:
    """Pieces of text by token id; an id without one is shown as its number."""

    def __init__(self, pieces: dict[int, str]) -> None:
        self._pieces = pieces

    @classmethod
    def of_run(cls, store: ObjectStore, names: Names) -> "Vocabulary":
        """That of the newest policy that can be read; an empty one where none has a file that is understood."""
        for version, lineage in reversed(list_policies(store, names)[-3:]):
            try:
                key = newest_revision(store, names.policy_manifest(lineage, version))
                file = next((each for each in read_manifest(store, key).files if each.name == _FILE), None)
                if file is None:
                    continue
                raw = store.get(file.key, max_bytes=_MAX_BYTES)
                return cls(pieces_of(decode_object(raw, what=_FILE, reason="TOKENIZER_CORRUPT", max_bytes=_MAX_BYTES)))
            except MillraceError:  # pruned or damaged: an older version may do
                continue
        return cls({})

    def text(self, token: int) -> str | None:
        """The piece of a token."""
        return self._pieces.get(token)


def of_secrets(pieces: Sequence[str | None], secrets: tuple[str, ...]) -> list[bool]:
    """Which of consecutive pieces are part of a secret that `redact` finds in their text."""
    ends = list(accumulate(len(piece or "") for piece in pieces))
    hidden = [False] * len(pieces)
    for begin, end in secret_spans("".join(piece or "" for piece in pieces), secrets=secrets):
        for at in range(bisect_right(ends, begin), bisect_left(ends, end) + 1):
            hidden[at] = True
    return hidden


def pieces_of(document: dict[str, Any]) -> dict[int, str]:
    """Token id → text, for vocabularies that are a table of pieces; what has another shape is left out."""
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found: dict[int, str] = {}
    is_byte_level = _names_type(document.get("decoder"), "ByteLevel") or _names_type(
        document.get("pre_tokenizer"), "ByteLevel"
    )
    letters = _byte_letters() if is_byte_level else None
    if isinstance(vocabulary, dict):
        pairs = vocabulary.items()
    elif isinstance(vocabulary, list):  # Unigram: [piece, score] by id
        pairs = ((item[0], at) for at, item in enumerate(vocabulary) if isinstance(item, list) and item)
    else:
        pairs = ()
    for piece, at in pairs:
        if isinstance(piece, str) and isinstance(at, int):
            found[at] = _shown(piece, letters)
    added = document.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("content"), str):
            found[token["id"]] = token["content"]
    return found


def _shown(piece: str, letters: dict[str, int] | None) -> str:
    if letters is None:
        return piece.replace(_SPACE, " ")
    data = bytes(letters[letter] for letter in piece if letter in letters)
    return data.decode(errors="replace")


def _names_type(part: Any, name: str) -> bool:
    """Whether a part of the document is of this type, or has one inside."""
    if isinstance(part, list):
        return any(_names_type(item, name) for item in part)
    if not isinstance(part, dict):
        return False
    return part.get("type") == name or any(_names_type(item, name) for item in part.values())


def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in byte-level vocabularies: printable Latin-1 for itself, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return letters | {chr(256 + at): byte for at, byte in enumerate(rest)}
