"""What the trainer computed of a sample's tokens, how far the engine's log-probs are from that, or why it is not known.

A difference is trainer − engine, of the log-prob of one token. Both sides are under the same sampling parameters; the
engine's is of the version that sampled, the trainer's of the one that the step was trained on.
"""

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from millrace.decoding import MAX_JSON_BYTES, decode_object
from millrace.errors import CorruptObjectError, MillraceError, NotFoundError
from millrace.policies.fetch import read_manifest
from millrace.readers.dashboard.views.facts import RunFacts
from millrace.rollouts.token_log import LoggedSample, TokenLog, samples_by_part
from millrace.rollouts.types import Rollout
from millrace.runlog.names import Names
from millrace.runlog.records.run_record import RunRecord, list_policies
from millrace.runlog.records.token_logs import find_token_log, load_token_log
from millrace.storage import ObjectStore
from millrace.storage.base import newest_revision
from millrace.telemetry.logging import secret_spans

_KEPT, _MAX_KEPT_BYTES = 2, 32 << 20
_MAX_NAMED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSequence:
    """A token sequence that was trained on, as the archive has it, and the batch that it is in."""

    step: int
    chain_hash: bytes
    rollouts: list[Rollout]
    place: int
    part: int
    window: slice

    @property
    def rollout(self) -> Rollout:
        """Return the rollout that the sequence belongs to."""
        return self.rollouts[self.place]


class TrainerLogprobs:
    """Answers for the samples of one run. Any thread may ask."""

    def __init__(self, store: ObjectStore, names: Names, facts: RunFacts) -> None:
        """Create the view over a run's token logs; `facts` are its events."""
        self._store = store
        self._names = names
        self._facts = facts
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, TokenLog] = OrderedDict()

    def of(self, asked: TrainedSequence) -> dict[str, Any]:
        """Return the trainer's columns over a window of a sequence's tokens; or only why there are none.

        Then `reason` (a name) and `why` (a sentence) say it, and `places` names the rollouts of the step that are
        logged, if others are.
        """
        try:
            key = find_token_log(self._store, self._names, asked.step)
            log = None if key is None else self._load(key)
        except NotFoundError:  # a run that is being deleted
            log = None
        except MillraceError as error:  # the page shows the rest
            return _none("OBJECT_DAMAGED" if isinstance(error, CorruptObjectError) else error.reason, error.message)
        if log is None:
            return self._without_object(asked.step)
        if (log.run_uid, log.step, log.chain_hash) != (self._names.uid, asked.step, asked.chain_hash):
            return _none("OTHER_HISTORY", f"what is stored for step {asked.step + 1} is of another batch than this one")
        found = samples_by_part(log, asked.rollout)[asked.part]
        if found is not None:
            return _columns(found, asked)
        if any(each.key == _key(asked.rollout) for each in log.samples):
            return _none("NOT_TRAINED", "nothing of this sequence was trained on")
        return _not_chosen(log, asked)

    def _load(self, key: str) -> TokenLog:
        """Return the token log under a whole key; the last few are kept, large ones are not."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        # Read without the lock, because that takes long: two who read the same log only do it twice.
        log = load_token_log(self._store, key)
        with self._lock:
            if sum(each.logprobs.nbytes for each in log.samples) <= _MAX_KEPT_BYTES:
                self._kept[key] = log
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return log

    def _without_object(self, step: int) -> dict[str, Any]:
        """Return why a step has no token log: the run stores none, the step is not done, or the log was never
        written.
        """
        if self._share() == 0:
            return _none("SHARE_IS_ZERO", "the run stores none: trainer.token_log.share is 0")
        if not self._facts.about(step + 1):
            return _none("STEP_NOT_DONE", f"the trainer has not finished step {step} yet, as far as the log was read")
        return _none(
            "OBJECT_MISSING",
            f"step {step} is done, but what the trainer computed of it is not in the store: it was killed before it "
            "had written that, or the store refused it (a warning TOKEN_LOG_NOT_STORED says so)",
        )

    def _share(self) -> float | None:
        """Return `trainer.token_log.share` of the run; None if its record cannot be read."""
        where = self._names.run_json
        try:
            config = RunRecord.parse(self._store.get(where, max_bytes=MAX_JSON_BYTES), where=where).config
        except MillraceError:
            return None
        for name in ("trainer", "token_log", "share"):
            config = config.get(name) if isinstance(config, dict) else None
        return config if isinstance(config, int | float) else None


def _columns(found: LoggedSample, asked: TrainedSequence) -> dict[str, Any]:
    """Return the answer for a sequence that was logged: columns over the window, and figures over all of its tokens."""
    sample = asked.rollout.samples[asked.part]
    is_sampled = found.mask != 0
    # The token log has sampled tokens alone, while the rollout's columns have every token.
    differences = found.logprobs - sample.inference_logprobs[: len(found.mask)][is_sampled]
    finite = np.abs(differences[np.isfinite(differences)])

    def column(values: np.ndarray) -> list[float | None]:
        """Return the values, one per sampled token, at their places in the window.

        None elsewhere, and where one is not finite.
        """
        whole = np.full(sample.num_tokens, np.nan, np.float64)
        whole[: len(found.mask)][is_sampled] = values
        return [float(f"{value:.5g}") if np.isfinite(value) else None for value in whole[asked.window]]

    return {
        "reason": "",
        "why": "",
        "logprobs": column(found.logprobs),
        "differences": column(differences),
        "entropies": column(found.entropies),
        "is_outside": _outside(found, sample.num_tokens)[asked.window],
        "mean": float(finite.mean()) if len(finite) else None,
        "max": float(finite.max()) if len(finite) else None,
        "num_tokens": len(finite),
        "num_not_finite": len(differences) - len(finite),
        "minibatch": found.minibatch,
    }


def _outside(found: LoggedSample, num_tokens: int) -> list[int]:
    """Return for each of the sequence's tokens 1 if it was sampled and truncated sampling leaves it out, else 0.

    Truncated sampling (top-p and the like) counts under the trainer's policy, which gives such a token no probability.
    """
    whole = np.zeros(num_tokens, np.uint8)
    whole[: len(found.mask)][found.mask != 0] = np.isneginf(found.logprobs)
    return whole.tolist()


def _not_chosen(log: TokenLog, asked: TrainedSequence) -> dict[str, Any]:
    """Return the answer for a rollout that is not among those that the token log holds, with the places of those
    that are.
    """
    logged = {each.key for each in log.samples}
    places = [place for place, each in enumerate(asked.rollouts) if _key(each) in logged and not each.is_duplicate]
    counted = f"of batch {asked.step}, {len(logged)} of {log.num_rollouts} rollouts are stored, and this one is not"
    return _none("NOT_CHOSEN", f"{counted}: trainer.token_log.share is {log.share:g}") | {"places": places[:_MAX_NAMED]}


def _key(rollout: Rollout) -> tuple[int, int, int]:
    """Return ordinal, member and attempt of a rollout."""
    return rollout.ordinal, rollout.member, rollout.attempt


def _none(reason: str, why: str) -> dict[str, Any]:
    """Return the answer that there are no columns: the name of the reason, and a sentence."""
    return {"reason": reason, "why": why}


def not_trained() -> dict[str, Any]:
    """Return the answer for a rollout that no step was trained on."""
    return _none("NOT_TRAINED", "it was not trained on, so the trainer computed nothing of it")


# The text of single tokens, read from the `tokenizer.json` that is published with a policy; no tokenizer is needed.

_FILE = "tokenizer.json"
_MAX_BYTES = 64 << 20
_SPACE = "▁"  # what SentencePiece writes for a space


class Vocabulary:
    """Pieces of text by token id; an id without one is shown as its number."""

    def __init__(self, pieces: dict[int, str]) -> None:
        self._pieces = pieces

    @classmethod
    def of_run(cls, store: ObjectStore, names: Names) -> "Vocabulary":
        """Read the vocabulary of the newest policy of a run that has a readable `tokenizer.json`.

        An empty one if the last three policies have none.
        """
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
        """Return the text of a token id; None if it is unknown."""
        return self._pieces.get(token)


def of_secrets(pieces: Sequence[str | None], secrets: tuple[str, ...]) -> list[bool]:
    """Return for each of consecutive pieces of a text whether it is part of a secret in their joined text.

    A piece that is None is an unknown text. `secrets` are known values, besides what `redact` recognizes.
    """
    ends = list(accumulate(len(piece or "") for piece in pieces))
    hidden = [False] * len(pieces)
    for begin, end in secret_spans("".join(piece or "" for piece in pieces), secrets=secrets):
        for at in range(bisect_right(ends, begin), bisect_left(ends, end) + 1):
            hidden[at] = True
    return hidden


def pieces_of(document: dict[str, Any]) -> dict[int, str]:
    """Return the text of each token id in a decoded `tokenizer.json`.

    Empty for vocabularies that are no table of pieces.
    """
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
    """Return the text of a vocabulary's piece; `letters` has the byte of each letter in byte-level ones, else None."""
    if letters is None:
        return piece.replace(_SPACE, " ")
    data = bytes(letters[letter] for letter in piece if letter in letters)
    return data.decode(errors="replace")


def _names_type(part: Any, name: str) -> bool:
    """Return whether a part of a `tokenizer.json` has the type `name`, or contains a part that has."""
    if isinstance(part, list):
        return any(_names_type(item, name) for item in part)
    if not isinstance(part, dict):
        return False
    return part.get("type") == name or any(_names_type(item, name) for item in part.values())


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter in byte-level vocabularies: printable Latin-1 is itself, others begin at 256."""
    # As `bytes_to_unicode` of GPT-2's tokenizer.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return letters | {chr(256 + at): byte for at, byte in enumerate(rest)}
