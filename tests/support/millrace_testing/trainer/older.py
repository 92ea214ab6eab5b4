"""Every family, written by transformers 4 or 5, saved by Millrace, and read by transformers 4.

python -m millrace_testing.trainer.older .venv-transformers-4    # the table in docs/models.md
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from millrace_testing.inference.tiny import TEMPLATE, tiny_tokenizer
from millrace_testing.trainer.families import FAMILIES, OTHERS, make_named
from millrace_testing.trainer.saved import saved_again
from millrace_testing.trainer.transformers_4 import ask, reading

_THETA = {"rope_theta": 77.5}
_LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [4.0, 5.0]}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
_OWN: Mapping[str, dict[str, Any]] = {
    "gemma3": {**_THETA, "rope_local_base_freq": 33.5, "tie_word_embeddings": True, **_LINEAR},
    "gemma3_text": {**_THETA, "rope_local_base_freq": 33.5, **_LINEAR},
    "glm4": {**_THETA, "partial_rotary_factor": 0.75},
    "glm4_moe": {**_THETA, "partial_rotary_factor": 0.75},
    "gpt_neox": {"rotary_emb_base": 77.5, "rotary_pct": 0.5, **_LINEAR},
    "gpt_oss": {**_THETA, "rope_scaling": {**_YARN, "truncate": False}},
    "nemotron": {**_THETA, "partial_rotary_factor": 1.0},
    "phi": {**_THETA, "partial_rotary_factor": 1.0, **_LINEAR},
    "phi3": {**_THETA, "rope_scaling": _LONGROPE, "rope_parameters": None},
    "olmo": {**_THETA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "olmo2": {**_THETA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "deepseek_v3": {**_THETA, "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
}
"""What is said of rotary embeddings, so that a default of them would be seen; of others a base and a factor."""
_MORE = {
    "llama, yarn": ("llama", {**_THETA, "rope_scaling": _YARN}),
    "llama, llama3": ("llama", {**_THETA, "rope_scaling": _LLAMA3}),
    "llama, dynamic": ("llama", {**_THETA, "rope_scaling": _DYNAMIC, "max_position_embeddings": 8}),
}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, _OWN.get(name, {**_THETA, **_LINEAR})) for name in [*FAMILIES, *OTHERS]},
    **_MORE,
}
"""A model of `families`, and what is said of it."""
_VISION = "model.vision_tower."
# Gemma 2 caps attention's scores, which one of the kernels of transformers 4 leaves out.
_KERNEL = {"attn_implementation": "eager"}
EQUAL, ALL_BUT_VISION, NOT_THERE = "equal", "equal but for the names of the vision part", "not in transformers 4"


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderReading:
    """What transformers 4 reads of a saved model whose start model was written by transformers 4, and by 5."""

    name: str
    of_4: str
    of_5: str


def compare(packages: Path, directory: Path) -> Iterator[OlderReading]:
    """Read every case; `packages` is the directory of transformers 4."""
    asked = [{"make": of, "into": str(directory / name / "4"), "changes": said} for name, (of, said) in CASES.items()]
    sources = dict(zip(CASES, ask(packages, asked), strict=True))
    mine: dict[tuple[str, str], tuple[Path, Any]] = {}
    questions: list[dict[str, Any]] = []
    for name, written in sources.items():
        for by, source in {"4": written, "5": _write(name, directory / name / "5")}.items():
            if isinstance(source, Mapping):
                continue
            _, saved = saved_again(Path(source), directory / name / f"saved-{by}")
            mine[name, by] = saved, reading(saved, **_KERNEL)
            questions.append({"read": str(saved), "how": _KERNEL})
            if by == "4":
                questions.append({"read": source, "how": {**_KERNEL, "dtype": "float32"}})
    answers = iter(ask(packages, questions))
    for name, written in sources.items():
        if isinstance(written, Mapping):
            of_4 = NOT_THERE if "Unrecognized model" in written["error"] else str(written["error"])
        else:
            of_4 = _outcome(next(answers), mine[name, "4"][1], next(answers))
        yield OlderReading(name=name, of_4=of_4, of_5=_outcome(next(answers), mine[name, "5"][1]))


def _write(name: str, directory: Path) -> Path:
    of, said = CASES[name]
    if of == "olmo3":  # of which transformers 5 gives the base to one kind of layers only
        kinds = {"full_attention": _LINEAR["rope_scaling"], "sliding_attention": {"rope_type": "default"}}
        said = {"rope_parameters": {kind: {**_THETA, **rope} for kind, rope in kinds.items()}}
    made = make_named(of, directory, **said)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": f"{TEMPLATE}!"}
    tokenizer.save_pretrained(made)
    return made


def _outcome(found: Any, *wanted: Any) -> str:
    """Return what differs between readings, in words."""
    if (error := found.get("error")) is not None:
        return NOT_THERE if "does not recognize this architecture" in error else str(error)
    problems = [each for other in wanted for each in _differences(found, other)]
    if problems:
        return "; ".join(dict.fromkeys(problems))
    left = {name for way in found["ways"].values() for names in way["left"].values() for name in names}
    return (ALL_BUT_VISION if all(_VISION in name for name in left) else f"left: {sorted(left)}") if left else EQUAL


def _differences(found: Any, wanted: Any) -> Iterator[str]:
    if isinstance(wanted, Mapping) and "error" in wanted:
        yield f"the start model does not load: {wanted['error']}"
        return
    for way, one in found["ways"].items():
        other = wanted["ways"][way]
        gap = (torch.tensor(one["logits"]) - torch.tensor(other["logits"])).abs().max()
        if not gap <= 1e-5:
            yield f"{way}: logits differ by {float(gap):.1g}"
        if (one["class"], one["dtype"]) != (other["class"], other["dtype"]):
            yield f"{way}: {one['class']} in {one['dtype']} is {other['class']} in {other['dtype']}"
    for what, one in found["tokenizer"].items():
        if one != wanted["tokenizer"][what]:
            yield f"the tokenizer's {what} are others"


def table(readings: Iterable[OlderReading]) -> str:
    """Return the table of docs/models.md: a line for each outcome, with the families that have it."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for each in readings:
        names[each.of_4 if each.of_4 == each.of_5 else f"{each.of_4}; {each.of_5} if written by 5"].append(each.name)
    lines = [f"| {outcome} | {'; '.join(each)} |" for outcome, each in names.items()]
    return "\n".join(["| read by transformers 4 | families |", "|---|---|", *lines]) + "\n"


def main() -> None:
    """Print the table."""
    import transformers

    transformers.logging.set_verbosity_error()  # pyright: ignore[reportPrivateImportUsage]
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        print(table(compare(Path(sys.argv[1]), Path(directory))), end="")


if __name__ == "__main__":
    main()
