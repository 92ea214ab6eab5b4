"""The experts that an engine computed tokens with, as answers of engines, rollouts and batches have them.

An array of them is [tokens, layers, top_k], uint8, or uint16 where a layer has more than 256 experts. Its tokens are
the first ones of a sequence: an engine computes no token beyond the last but one, and what an environment wrote last is
computed by nobody. Its layers are those that have experts, or all layers, whatever the engine reports; its order of
experts is the router's.

vLLM answers a .npy file in base64 (`enable_return_routed_experts`), and so does the embedded engine. `from_answer` is
the only reader of that, and `experts_from_proto` the only one of stored ones. Both refuse what does not have the length
that its shape says.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import CorruptObjectError
from millrace.internal.v1 import rollout_pb2
from millrace.rollouts.types import RoutedArray, Uint8Array

FIELD = "routed_experts"
"""Field of a choice, in the answer of an engine."""
START_FIELD = "routed_experts_prompt_start"
"""Parameter of a request: the experts of so many tokens of the prompt are left out of the answer."""
MAX_LAYERS, MAX_TOP_K = 1024, 256
_DTYPES = {1: np.dtype("u1"), 2: np.dtype("<u2")}
_MAGIC = b"\x93NUMPY\x01\x00"
_PREFIX_BYTES = len(_MAGIC) + 2
_HEADER = re.compile(
    rb"\{'descr': '(?P<descr>\|u1|<u2)', 'fortran_order': False, "
    rb"'shape': \((?P<tokens>\d{1,9}), (?P<layers>\d{1,4}), (?P<top_k>\d{1,3})\), \} *\n"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedCall:
    """The experts of the tokens `[start, start + len(experts))` of a model call's prompt and completion.

    `before` has those of the tokens before `start`, if an earlier call with the same first tokens recorded them.
    """

    start: int
    experts: RoutedArray
    before: "RoutedCall | None" = None

    @property
    def end(self) -> int:
        """Return one past the last token that has experts: the index of the call's last token."""
        return self.start + len(self.experts)

    def after(self, earlier: "RoutedCall | None") -> "RoutedCall":
        """Return the call with what is new in it alone, and `earlier` before that.

        The prompt begins with all tokens of the earlier call. The call is returned as it is without an earlier one, and
        if that leaves a gap before it or recorded experts of another shape.
        """
        if earlier is None or self.before is not None or not self.start <= earlier.end <= self.end:
            return self
        if not _are_alike(earlier.experts, self.experts):
            return self
        # A copy, since a view would keep the whole answer in memory.
        new = self.experts[earlier.end - self.start :].copy()
        return RoutedCall(start=earlier.end, experts=new, before=earlier)

    def since(self, token: int) -> RoutedArray | None:
        """Return the experts of the tokens from `token` on; None if those of some are not known."""
        parts: list[RoutedArray] = []
        at: RoutedCall | None = self
        while at is not None and token < at.start:
            parts.append(at.experts)
            at = at.before
        if at is None:
            return None
        parts.append(at.experts[token - at.start :])
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedForm:
    """What an engine says that the experts in its answers look like: `top_k` of `num_experts` in each layer."""

    num_layers: int
    num_experts: int
    top_k: int

    def problem_of(self, experts_TXK: RoutedArray) -> str:
        """Return why these are no experts of that form, in words that follow "recorded"; "" if they are."""
        _, num_layers, top_k = experts_TXK.shape
        if (num_layers, top_k) != (self.num_layers, self.top_k):
            return f"{top_k} experts in each of {num_layers} layers for a token"
        if experts_TXK.size and (largest := int(experts_TXK.max())) >= self.num_experts:
            return f"expert {largest} for a token"
        if (layer := repeating_layer(experts_TXK)) is not None:
            return f"an expert twice for a token in layer {layer}"
        return ""


def dtype_of(num_experts: int) -> np.dtype[Any]:
    """Return the dtype of the experts of layers that have `num_experts`."""
    return _DTYPES[1 if num_experts <= 256 else 2]


def to_answer(experts: RoutedArray) -> str:
    """Return experts as an answer of an engine has them: a .npy file of version 1, in base64."""
    descr = "|u1" if experts.dtype.itemsize == 1 else "<u2"
    shape = ", ".join(map(str, experts.shape))
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}"
    # The format's data begins at a multiple of 64 bytes, and the header ends with a line feed.
    header += " " * (-(_PREFIX_BYTES + len(header) + 1) % 64) + "\n"
    data = _MAGIC + len(header).to_bytes(2, "little") + header.encode() + experts.tobytes()
    return base64.b64encode(data).decode()


def from_answer(choice: Mapping[str, Any], *, num_tokens: int, start: object = None) -> RoutedCall | None:
    """Return the experts in a choice of an engine's answer; None if the engine recorded none.

    `num_tokens` are those of prompt and completion, and `start` is what the request sent as START_FIELD. Raises
    CorruptObjectError for what is no such array, has not the experts of every token from `start` to the last but one,
    or has an expert twice in a layer of a token.
    """
    text = choice.get(FIELD)
    if text is None:
        return None
    experts = _from_npy(text)
    first = start if isinstance(start, int) else 0
    if first < 0 or first + len(experts) != num_tokens - 1:
        raise _corrupt(
            FIELD, f"{len(experts)} tokens from token {first}", f"are not all but the last of {num_tokens} tokens"
        )
    if (layer := repeating_layer(experts)) is not None:
        raise _corrupt(FIELD, f"layer {layer}", "has an expert twice for one token")
    return RoutedCall(start=first, experts=experts)


def repeating_layer(experts_TXK: RoutedArray) -> int | None:
    """Return the first layer in which a token has an expert twice; None if there is none.

    A layer in which all are 0 is one without experts, as vLLM reports it.
    """
    tokens, layers, top_k = experts_TXK.shape
    # Each pair of places as two long rows is 30 times as fast as sorting many short ones.
    places_KN = np.ascontiguousarray(experts_TXK.reshape(tokens * layers, top_k).T)
    repeats_N = np.zeros(tokens * layers, np.bool_)
    for place in range(1, top_k):
        for other in range(place):
            repeats_N |= places_KN[place] == places_KN[other]
    found = np.flatnonzero(repeats_N.reshape(tokens, layers).any(axis=0)).tolist()
    return next((layer for layer in found if experts_TXK[:, layer].any()), None)


def _from_npy(text: object) -> RoutedArray:
    """Return the array of a .npy file in base64, read-only; CorruptObjectError for any other than three axes of small
    unsigned numbers.
    """
    if not isinstance(text, str):
        raise _corrupt(FIELD, type(text).__name__, "is no text")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _corrupt(FIELD, f"{len(text)} characters", f"is no base64: {error}") from error
    if not data.startswith(_MAGIC) or len(data) < _PREFIX_BYTES:
        raise _corrupt(FIELD, f"{len(data)} bytes", "is no .npy file of version 1")
    end = _PREFIX_BYTES + int.from_bytes(data[len(_MAGIC) : _PREFIX_BYTES], "little")
    header = _HEADER.fullmatch(data[_PREFIX_BYTES:end])
    if header is None:
        raise _corrupt(FIELD, repr(data[_PREFIX_BYTES : _PREFIX_BYTES + 80]), "is no header of three axes of bytes")
    shape = tuple(int(header[axis]) for axis in ("tokens", "layers", "top_k"))
    dtype = _DTYPES[1 if header["descr"] == b"|u1" else 2]
    return _shaped(data[end:], dtype, shape, where=FIELD)


def _shaped(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], *, where: str) -> RoutedArray:
    """Return the bytes as a read-only array; CorruptObjectError, naming `where`, if they do not have the shape's
    length.
    """
    tokens, layers, top_k = shape
    if not (1 <= layers <= MAX_LAYERS and 1 <= top_k <= MAX_TOP_K):
        raise _corrupt(where, shape, f"is not [tokens, 1 to {MAX_LAYERS}, 1 to {MAX_TOP_K}]")
    if len(data) != tokens * layers * top_k * dtype.itemsize:
        raise _corrupt(where, f"{len(data)} bytes", f"are not {list(shape)} numbers of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype).reshape(shape)


def check_experts(experts: RoutedArray | None, num_tokens: int, *, where: str) -> None:
    """Raise CorruptObjectError, naming `where`, unless the experts are those of at most `num_tokens` tokens.

    None is right.
    """
    if experts is None:
        return
    if experts.dtype not in _DTYPES.values() or experts.ndim != 3:
        raise _corrupt(where, f"{experts.dtype}{list(experts.shape)}", "is not uint8 or uint16 [tokens, layers, top_k]")
    tokens, layers, top_k = experts.shape
    if not (1 <= tokens <= num_tokens and 1 <= layers <= MAX_LAYERS and 1 <= top_k <= MAX_TOP_K):
        problem = f"is not [1 to {num_tokens}, 1 to {MAX_LAYERS}, 1 to {MAX_TOP_K}]"
        raise _corrupt(where, list(experts.shape), problem)


def experts_to_proto(experts: RoutedArray | None) -> rollout_pb2.RoutedExperts | None:
    """Return the protobuf form of experts; None for None."""
    if experts is None:
        return None
    size = experts.dtype.itemsize
    return rollout_pb2.RoutedExperts(
        experts=np.ascontiguousarray(experts, _DTYPES[size]).tobytes(),
        num_layers=experts.shape[1],
        top_k=experts.shape[2],
        id_bytes=size,
    )


def experts_from_proto(message: rollout_pb2.RoutedExperts, *, where: str, num_tokens: int | None = None) -> RoutedArray:
    """Return the experts of a message as a read-only view; CorruptObjectError, naming `where`, if their bytes have
    another length than their shape.

    They are of exactly `num_tokens` tokens; None: of as many as there are bytes for.
    """
    if message.id_bytes not in _DTYPES:
        raise _corrupt(where, message.id_bytes, "is not 1 or 2 bytes for a number")
    dtype = _DTYPES[message.id_bytes]
    token_bytes = message.num_layers * message.top_k * dtype.itemsize
    tokens = len(message.experts) // max(token_bytes, 1) if num_tokens is None else num_tokens
    return _shaped(message.experts, dtype, (tokens, message.num_layers, message.top_k), where=where)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedColumn:
    """The experts of a batch's tokens: `is_known` uint8 [T], 1 where they are recorded, and `experts` of those."""

    is_known: Uint8Array
    experts: RoutedArray

    @classmethod
    def joined(cls, each: Sequence[RoutedArray | None], lengths: Sequence[int]) -> "RoutedColumn | None":
        """Return the experts of samples that have so many tokens as one column; None if no sample has any.

        All have the same layers, top_k and dtype.
        """
        if all(experts is None for experts in each):
            return None
        counts = [0 if experts is None else len(experts) for experts in each]
        is_known = np.concatenate([np.arange(n) < k for n, k in zip(lengths, counts, strict=True)]).astype(np.uint8)
        return cls(is_known=is_known, experts=np.concatenate([experts for experts in each if experts is not None]))

    @classmethod
    def decoded(cls, message: rollout_pb2.RoutedExperts, is_known: Uint8Array, *, where: str) -> "RoutedColumn":
        """Return the column of a message; CorruptObjectError, naming `where`, if it has not the experts of the tokens
        that `is_known` names.
        """
        experts = experts_from_proto(message, num_tokens=int(np.count_nonzero(is_known)), where=where)
        return cls(is_known=is_known, experts=experts)

    def of(self, part: slice) -> RoutedArray | None:
        """Return the experts of the sample whose tokens are `part`; None if none are recorded.

        Raises CorruptObjectError if they are not those of its first tokens.
        """
        known = self.is_known[part]
        count = int(np.count_nonzero(known))
        if not known[:count].all():
            raise _corrupt("routed_tokens", count, "are not the first tokens of their sample")
        before = int(np.count_nonzero(self.is_known[: part.start]))
        return self.experts[before : before + count] if count else None


def shape_of(experts: RoutedArray | None) -> tuple[int, ...] | None:
    """Return (layers, top_k, bytes of a number) of experts; None for None."""
    return None if experts is None else (*experts.shape[1:], experts.dtype.itemsize)


def extended(known: RoutedArray | None, call: RoutedCall | None) -> RoutedArray | None:
    """Return the experts of a sequence's first tokens after one more model call, whose prompt begins with them.

    Experts that are known stay: a token that an earlier call sampled was sampled with those. A call that begins after
    a token without experts, or reports another shape, adds nothing.
    """
    if call is None:
        return known
    if known is None:
        return call.since(0)
    if not _are_alike(known, call.experts) or call.end <= len(known) or (new := call.since(len(known))) is None:
        return known
    return np.concatenate([known, new])


def _are_alike(one: RoutedArray, other: RoutedArray) -> bool:
    """Return whether two arrays have experts of the same layers, in the same number and format."""
    return one.shape[1:] == other.shape[1:] and one.dtype == other.dtype


def _corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    """Return the error that the experts in the field `where` have this value, which is wrong as `problem` says."""
    return CorruptObjectError(
        f"experts of tokens: {where} = {value} {problem}",
        reason="ROUTED_EXPERTS_INVALID",
        remedy="read them again; if it stays, the engine or the env-server that made them has a bug",
        metadata={"field": where},
    )
