"""The examples of a forward-backward request, checked: tokens, targets and what the loss needs of each token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import InvalidSpecError, Violation
from millrace.internal.v1 import tinker_pb2 as pb

TARGETS = "target_tokens"
MAX_DATA = 1 << 16
_FORMATS: dict[int, Any] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """One sequence: `tokens` int64 [T], `targets` int64 [T], of which each follows the tokens up to its place, and
    `values` float32 [T] by name.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float32]]


def refused(field: str, message: str, value: object = None) -> InvalidSpecError:
    """Make the error that a field of a request is wrong; `message` says what it must be."""
    shown = None if value is None else str(value)[:200]
    return InvalidSpecError([Violation(field=field, value=shown, message=message)], reason="REQUEST_INVALID")


def read_examples(
    request: pb.ForwardBackwardRequest, *, inputs: Sequence[str], vocab_size: int, max_tokens: int
) -> list[Example]:
    """Return the examples of a request, each of which must have the loss's `inputs`, one number for each target.

    Raises InvalidSpecError, naming the datum, for what is missing, of another length, not finite, or no token.
    """
    if not 1 <= len(request.data) <= MAX_DATA:
        raise refused("data", f"must have 1 to {MAX_DATA} examples", len(request.data))
    return [
        _example(datum, f"data[{place}]", inputs=inputs, vocab_size=vocab_size, max_tokens=max_tokens)
        for place, datum in enumerate(request.data)
    ]


def _example(datum: pb.Datum, where: str, *, inputs: Sequence[str], vocab_size: int, max_tokens: int) -> Example:
    """Return one example; `where` names it in errors."""
    tokens = prompt_tokens(datum.model_input, where, vocab_size=vocab_size)
    if not 1 <= len(tokens) <= max_tokens:
        raise refused(f"{where}.model_input", f"must have 1 to {max_tokens} tokens", len(tokens))
    given = {name: _vector(tensor, f"{where}.{name}") for name, tensor in datum.loss_fn_inputs.items()}
    for name in (TARGETS, *inputs):
        if name not in given:
            raise refused(f"{where}.loss_fn_inputs", f"must have {name}", ", ".join(sorted(given)))
    # Others than the loss needs are checked, too: what has another length is a mistake of its sender.
    for name, values in given.items():
        if len(values) != len(tokens):
            raise refused(f"{where}.{name}", f"must have {len(tokens)} numbers, one for each token", len(values))
    targets = given[TARGETS]
    if targets.dtype.kind != "i" or not _are_tokens(targets, vocab_size):
        raise refused(f"{where}.{TARGETS}", f"must be whole numbers from 0 to {vocab_size - 1}")
    chosen = {name: given[name].astype(np.float32) for name in inputs}
    for name, values in chosen.items():
        if not np.isfinite(values).all():
            raise refused(f"{where}.{name}", "must be finite numbers")
    return Example(tokens=tokens, targets=targets.astype(np.int64), values=chosen)


def prompt_tokens(chunks: Sequence[pb.Chunk], where: str, *, vocab_size: int) -> NDArray[np.int64]:
    """Return the token ids of a model's input, int64 [T].

    Raises InvalidSpecError, naming `where`, for images and sounds, and for ids that are not in the vocabulary.
    """
    parts: list[NDArray[np.int64]] = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            raise refused(f"{where}.model_input", "must be tokens of text")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4").astype(np.int64))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if not _are_tokens(tokens, vocab_size):
        raise refused(f"{where}.model_input", f"must be token ids from 0 to {vocab_size - 1}")
    return tokens


def _are_tokens(values: NDArray[Any], vocab_size: int) -> bool:
    """Return whether all values are token ids."""
    return not len(values) or bool(values.min() >= 0 and values.max() < vocab_size)


def _vector(tensor: pb.Tensor, where: str) -> NDArray[Any]:
    """Return a dense tensor of one dimension.

    Raises InvalidSpecError, naming `where`, for a sparse one, another format or number of dimensions, and where shape
    and bytes disagree.
    """
    kind = _FORMATS.get(tensor.dtype)
    if kind is None:
        raise refused(where, "must be float32, int32 or int64", pb.DType.Name(tensor.dtype))
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise refused(where, "must be dense")
    if len(tensor.dense) % kind.itemsize or list(tensor.shape) != [len(tensor.dense) // kind.itemsize]:
        raise refused(where, f"has {len(tensor.dense)} bytes of {kind.name}, and is no vector", list(tensor.shape))
    return np.frombuffer(tensor.dense, kind)


def loss_config(request: pb.ForwardBackwardRequest) -> dict[str, float]:
    """Return the configuration of a request's loss by name; InvalidSpecError for a text or a number that is not finite.

    `loss_fn_config_v2` counts where it is given.
    """
    found: dict[str, float] = dict(request.loss_fn_config)
    if request.loss_fn_config_v2:
        found = {}
        for name, value in request.loss_fn_config_v2.items():
            if value.WhichOneof("value") != "number":
                raise refused(f"loss_fn_config.{name}", "must be a number", value.text)
            found[name] = value.number
    for name, value in found.items():
        if not np.isfinite(value):
            raise refused(f"loss_fn_config.{name}", "must be finite", value)
    return found


def output_of(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a forward-backward request as the SDK reads it: log-probs float32 [T] of each example."""
    offsets = np.cumsum([0, *(4 * len(each) for each in logprobs)]).astype("<i8")
    data = b"".join(each.astype("<f4").tobytes() for each in logprobs)
    record = pb.ArrayRecord(type_tag="logprobs", num_datums=len(logprobs))
    record.fields["logprobs"].CopyFrom(pb.BatchedTensor(data=data, offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32))
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics)
    return output.SerializeToString(deterministic=True)
