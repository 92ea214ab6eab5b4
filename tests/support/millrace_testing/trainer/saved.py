"""A model goes through all that Millrace does with it, and what comes out is compared with what went in.

python -m millrace_testing.trainer.saved    # a row for each family; docs/models.md sums them up
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from millrace.policies.host_copy import download_hf
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.pretrained import load_model, policy_files
from millrace.trainer.model.published import policy_tensors
from millrace.trainer.sft.checkpoints import save_model
from millrace_testing.inference.tiny import TEMPLATE, tiny_tokenizer
from millrace_testing.trainer.families import FAMILIES, OTHERS, make_family, make_other

_LENGTH = 12
_FORMATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """What came of a model: its class, how many tensors it has in memory and saved, and what is wrong.

    `kept` are the ends of the names that stay float32.
    """

    saved_as: str
    num_held: int
    num_saved: int
    kept: tuple[str, ...]
    problems: tuple[str, ...]


def round_trip(name: str, directory: Path) -> RoundTrip:
    """Save a model of `families` and a policy of it in both formats, and load both in every way that transformers has.

    Return the outcome. The logits have to be equal to those of the source, bit for bit, loaded by transformers in that
    format.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = (make_family if name in FAMILIES else make_other)(name, directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": f"{TEMPLATE}!"}
    tokenizer.save_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)  # which may be of the class that the model's type asks for
    problems: list[str] = []
    kept = set[str]()
    model, _ = saved_again(source, directory / "first")
    model.save_pretrained(directory / "theirs")
    for dtype in _FORMATS:
        made = {
            "saved": saved_again(source, directory / f"saved-{dtype}", dtype=dtype)[1],
            "a policy": exported_again(model, source, directory / f"policy-{dtype}", dtype=dtype),
        }
        theirs = model if dtype == torch.float32 else AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        wanted = {"logits": logits_of(theirs), "dtype": dtype, "gap": 0.0}
        for what, where in made.items():
            formats = formats_in(where)
            kept |= {each for each, found in formats.items() if dtype == torch.bfloat16 and found == "F32"}
            if formats.keys() != names_in(directory / "theirs"):
                problems.append(f"{what} has other names than transformers gives")
            problems += [f"{what}, {way}: {bad}" for way, bad in loading_problems(where, wanted).items()]
            problems += [f"{what}: {bad}" for bad in tokenizer_problems(where, tokenizer)]
    return RoundTrip(
        saved_as=type(model).__name__,
        num_held=len(model.state_dict()),
        num_saved=len(names_in(directory / "theirs")),
        kept=tuple(sorted({".".join(each.split(".")[-2:]) for each in kept})),
        problems=tuple(problems),
    )


def saved_again(source: Path, target: Path, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
    """Load a model from a directory with Millrace, and save it; return the model and the new directory."""
    model = load_model(source)
    files = policy_files(model, source, dtype=dtype)
    return model, save_model(model, files=files, target=target, dtype=dtype, gang=Gang())


def exported_again(model: Any, source: Path, target: Path, *, dtype: torch.dtype) -> Path:
    """Publish the model and export it as `millrace run export-policy` does; return the directory."""
    store = LocalStore(target.with_name(f"{target.name}-store"))
    contents = PolicyContents(
        tensors=list(policy_tensors(model, dtype=dtype)), files=policy_files(model, source, dtype=dtype)
    )
    place = PolicyPlace(prefix="p", uid="u", lineage=0, version=1)
    return download_hf(store, publish_policy(store, place, contents, epoch=1).manifest, target)


def names_in(directory: Path) -> set[str]:
    """Return the names of the tensors in a directory's files."""
    return set(formats_in(directory))


def formats_in(directory: Path) -> dict[str, str]:
    """Return the number formats of the tensors in a directory's files, as safetensors calls them."""
    found: dict[str, str] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


def loading_problems(directory: Path, wanted: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong with the model that transformers loads, by way of loading.

    Its logits must be those in `wanted`, up to a `gap`.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    [architecture] = config.architectures or [""]
    problems: dict[str, str] = {}
    for way, loader in {architecture: getattr(transformers, architecture), "auto": AutoModelForCausalLM}.items():
        model, info = loader.from_pretrained(directory, dtype="auto", output_loading_info=True)
        left = {key: sorted(names) for key, names in info.items() if names}
        if left or type(model).__name__ != architecture or model.dtype != wanted["dtype"]:
            problems[way] = f"a {type(model).__name__} in {model.dtype}, {left}"
        elif (gap := float((logits_of(model) - wanted["logits"]).abs().max())) > wanted["gap"]:
            problems[way] = f"its logits differ by {gap}"
    return problems


def tokenizer_problems(directory: Path, wanted: Any) -> list[str]:
    """Return what differs between the tokenizer in a directory and another one."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(directory)
    text = "<|im_start|>user\nnaïve 12<|im_end|>"
    pairs = {
        "templates": (found.chat_template, wanted.chat_template),
        "vocabulary": (found.get_vocab(), wanted.get_vocab()),
        "tokens": (found(text)["input_ids"], wanted(text)["input_ids"]),
        "special tokens": (found.special_tokens_map, wanted.special_tokens_map),
    }
    return [f"the tokenizer's {what} are others" for what, (one, other) in pairs.items() if one != other]


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    """Return the logits [T, V] of a short row."""
    vocabulary = model.config.get_text_config().vocab_size  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    token_ids = torch.tensor([[(7 * index + 3) % min(vocabulary, 60) for index in range(_LENGTH)]])
    return model.eval()(input_ids=token_ids, use_cache=False).logits[0].float()


def main() -> None:
    """Print the table."""
    import transformers

    transformers.logging.set_verbosity_error()  # pyright: ignore[reportPrivateImportUsage]
    transformers.utils.logging.disable_progress_bar()
    print("| model | saved as | tensors in memory, saved | float32 in bfloat16 | round trip |\n|---|---|---|---|---|")
    for name in [*FAMILIES, *OTHERS]:
        with tempfile.TemporaryDirectory() as directory:
            found = round_trip(name, Path(directory))
        kept = ", ".join(f"`{each}`" for each in found.kept) or "none"
        outcome = "; ".join(found.problems) or "yes"
        print(f"| {name} | `{found.saved_as}` | {found.num_held}, {found.num_saved} | {kept} | {outcome} |", flush=True)


if __name__ == "__main__":
    main()
