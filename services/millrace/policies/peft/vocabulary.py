"""Whole tensors of an adapter, and what they mean where embedding and head have one weight."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from millrace.policies.adapter import Shape
from millrace.policies.peft.config import PeftConfig
from millrace.policies.tensors import FLOATS, TensorBytes

HEADS = ("lm_head", "embed_out", "output_layer")
"""Last parts of the names of output embeddings."""
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings", "embedding", "tok_embeddings")


@dataclass(slots=True, kw_only=True)
class Whole:
    """Where the whole tensors of an adapter go."""

    given: Set[str]
    """The model's names of all of them."""
    tensors: dict[str, str] = field(default_factory=dict)
    """What replaces the base's tensors: name in the model, name as stored."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Of what is replaced, by name in the model."""
    problems: list[str] = field(default_factory=list)
    head_of_base: tuple[str, str] | None = None
    """Name of a head that keeps the base's embedding, and that embedding's name."""
    is_untied: bool = False
    vocabulary: int | None = None
    """Rows of the new embedding; None if the base's count stays."""


def end_of(layer: str) -> str:
    """The last part of a layer's name."""
    return layer.rpartition(".")[2]


def is_vocabulary(layer: str) -> bool:
    """Whether the layer has a row for each token, by its name."""
    return end_of(layer) in (*HEADS, *_EMBEDDINGS)


def place_whole(
    stored: Mapping[str, str],
    adapter: Mapping[str, TensorBytes],
    base: Mapping[str, Shape],
    *,
    config: PeftConfig,
    is_tied: bool,
) -> Whole:
    """Find the place of every whole tensor; `stored` has the names as stored by the model's names."""
    found = Whole(given=stored.keys(), tensors=dict(stored))
    if is_tied:
        _untie(found, adapter, base, config=config)
    for name, source in found.tensors.items():
        layer = name.rpartition(".")[0]
        tensor, old = adapter[source], base.get(name)
        if old is None and found.is_untied and end_of(layer) in HEADS:
            old = base.get(_embedding(base) or "")
        if old is None:
            found.problems.append(f"{name} is no tensor of the model")
        elif config.targets(layer) != (".base_layer." in source):
            found.problems.append(f"{source} is not where PEFT has it for a layer with its config")
        elif tensor.dtype not in FLOATS or old[0] not in FLOATS or not _fits(layer, tensor.shape, old[1]):
            shown = f"{tensor.dtype}{list(tensor.shape)}"
            found.problems.append(f"{name} is {shown}, the model takes {old[0]}{list(old[1])}")
        else:
            found.shapes[name] = (old[0], tensor.shape)
    found.vocabulary = _resized(found, base)
    return found


def _untie(found: Whole, adapter: Mapping[str, TensorBytes], base: Mapping[str, Shape], *, config: PeftConfig) -> None:
    """Decide which of embedding and head have which weight, as PEFT loads them into one module with two names.

    What is in `modules_to_save` becomes a module of its own; what is not is written into the common weight.
    """
    embedding = _embedding(base)
    head = next((name for name in found.given if name.endswith(".weight") and end_of(name[:-7]) in HEADS), None)
    if embedding is None:
        if head is not None:
            found.problems.append(f"{head} is the embedding, too, whose name is not known")
        return
    has_embedding, is_saved = embedding in found.given, config.saves(embedding[:-7])
    if head is None:
        if has_embedding and is_saved:
            found.is_untied, found.head_of_base = True, ("lm_head.weight", embedding)
        return
    is_head_saved, source = config.saves(head[:-7]), found.tensors[head]
    if not has_embedding:
        found.is_untied = is_head_saved
        if not is_head_saved:
            found.tensors[embedding] = found.tensors.pop(head)
    elif adapter[source].data == adapter[found.tensors[embedding]].data:
        del found.tensors[head]
    elif is_saved or is_head_saved:
        found.is_untied = True
    else:
        found.problems.append(f"{embedding} and {head} differ, and are one weight in the model")


def _embedding(base: Mapping[str, Shape]) -> str | None:
    """The input embedding, if its name is known and the only such."""
    names = [name for name in base if name.endswith(".weight") and end_of(name[:-7]) in _EMBEDDINGS]
    return names[0] if len(names) == 1 else None


def _fits(layer: str, shape: tuple[int, ...], old: tuple[int, ...]) -> bool:
    """Whether the shapes are the same, except for the number of tokens."""
    return shape == old or (is_vocabulary(layer) and len(shape) == 2 and shape[1:] == old[1:])


def _resized(found: Whole, base: Mapping[str, Shape]) -> int | None:
    """The new number of tokens, if it is another and everything with a row for each token has it."""
    old = {name: base[name][1] for name in base if name.endswith(".weight") and is_vocabulary(name[:-7])}
    changed = {shape[0] for name, (_, shape) in found.shapes.items() if old.get(name, shape) != shape}
    if not changed:
        return None
    keeps = [name for name in old if name not in found.shapes]
    if found.head_of_base is not None:
        keeps.append(found.head_of_base[0])
    if keeps or len(changed) > 1:
        found.problems.append(f"embeddings have {sorted(changed)} rows; {', '.join(keeps) or 'each'} has another count")
    return max(changed)
