"""Every family on real vLLM: as it is saved, as a policy, and after a delta, beside transformers.

    python -m millrace_testing.inference.vllm_families PYTHON [FAMILY ...]    # rows; docs/models.md sums them up

PYTHON is that of an environment with vLLM. Models that see need torchvision, which that for CPUs lacks:
`pip install --no-deps --target DIRECTORY torchvision==0.28.0`, and DIRECTORY in TORCHVISION_DIR.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from millrace.errors import InternalError
from millrace.policies.host_copy import read_manifest
from millrace.policies.manifest import PolicyManifest
from millrace.policies.proof import combine
from millrace.policies.tensors import TensorBytes
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.pretrained import load_model, policy_files
from millrace.trainer.model.published import policy_tensors
from millrace.trainer.sft.checkpoints import save_model
from millrace_testing.inference import published, vllm_programs
from millrace_testing.inference.tiny import tiny_tokenizer
from millrace_testing.trainer.families import FAMILIES, OTHERS, keys_of, make_named

PROMPT = [(7 * index + 3) % 250 for index in range(40)]
GAPS = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""How far log-probs of the prompt may be from transformers' in that format: the greatest difference in float32, the
mean in bfloat16, where experts of equal merit are chosen by the last bit."""
WAYS = ("saved", "a policy", "a delta", "weights of a directory", "a policy on its parent", "a delta on its parent")
"""Of a text part its parent is the model that also sees, on which vLLM was started."""
_TEXT = ", text part"
_AT_A_TIME = 10
_SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # its latent attention has this size only
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""vLLM's attention on CPUs has heads of 32 and more."""
_LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
_OWN: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": {**FAMILIES["phi3"].get("rope_parameters", {}), **_LONGROPE}},
    **{name: {"tie_word_embeddings": True} for name in ("cohere", "cohere2", "gemma2")},
}
"""Sizes of some alone. vLLM computes these with the embedding as head, whatever their config says."""
_OPTIONS: dict[str, dict[str, Any]] = {"gemma3": {"language_model_only": True}}
"""Of vLLM, which has to know how images are processed where it takes some."""
FORMATS = {
    **{f"qwen3_5{kind}, text part": (torch.bfloat16,) for kind in ("", "_moe")},  # vLLM has no float32 for it on a CPU
    **dict.fromkeys(("deepseek_v3, experts", "glm4_moe"), (torch.float32, torch.bfloat16)),
}
"""Of those in which some tensors stay float32, and of those that must be bfloat16; others are compared in float32."""
TIED = tuple(name for name, sizes in _OWN.items() if sizes.get("tie_word_embeddings"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model that was saved, two versions of it, and what transformers says of the prompt by `WAYS`."""

    name: str
    dtype: torch.dtype
    asked: Mapping[str, Any]
    manifests: tuple[PolicyManifest, ...]
    wanted: tuple[torch.Tensor, ...]


def formats_of(name: str) -> tuple[torch.dtype, ...]:
    """Return the number formats in which the family is compared."""
    return FORMATS.get(name, (torch.float32,))


def make_job(name: str, directory: Path, *, dtype: torch.dtype) -> Job:
    """Save a model of the family, publish it, change some numbers of every tensor, and publish the delta.

    Return the job.
    """
    directory.mkdir(parents=True)
    sizes = _SIZES | _OWN.get(name, {})
    source = make_named(name, directory, **{key: value for key, value in sizes.items() if key in keys_of(name)})
    tiny_tokenizer().save_pretrained(source)
    model, store = load_model(source), LocalStore(directory / "store")

    def tensors_of(held: torch.nn.Module) -> dict[str, TensorBytes]:
        return dict(policy_tensors(held, dtype=dtype))

    def said(place: str) -> torch.Tensor:
        files = policy_files(model, source, dtype=dtype)
        return said_in(save_model(model, files=files, target=directory / place, dtype=dtype, gang=Gang()))

    publisher = published.Publisher(store, directory, "run1", tensors_of=tensors_of)
    entries, first = [publisher.full(model, 0)], said("saved")
    change(model)
    entries.append(publisher.delta(model, 1, base=0))
    manifests = tuple(read_manifest(store, entry.manifest_key, entry.manifest_sha256) for entry in entries)
    asked = {
        "model": str(directory / "saved"),
        "prompt": PROMPT,
        "options": {"dtype": str(dtype).removeprefix("torch."), "max_model_len": 64, **_OPTIONS.get(name, {})},
        "orders": vllm_programs.orders_of(directory, entries),
        "tensors": [entry.name for entry in manifests[0].tensors],
        "out": str(directory / "out.json"),
    }
    wanted = (first, first, said("changed"), first)
    if name.endswith(_TEXT):
        asked["parent"] = str(source)
        wanted += wanted[1:3]
    return Job(name=name, dtype=dtype, asked=asked, manifests=manifests, wanted=wanted)


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    """Change some numbers of every tensor."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        chosen = torch.rand(weight.shape, generator=generator) < 0.1
        weight[chosen] += 0.5 * weight.abs().mean() * torch.randn(int(chosen.sum()), generator=generator)


@torch.no_grad()
def said_in(directory: Path) -> torch.Tensor:
    """Return the log-probs [T - 1] of the prompt's tokens, computed by the model that transformers loads from the
    directory.
    """
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([PROMPT])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)


def on_vllm(jobs: Sequence[Job], directory: Path, *, python: str) -> list[dict[str, Any]]:
    """Run all jobs in one process with vLLM, and return its results."""
    path = directory / "jobs.json"
    path.write_text(json.dumps([job.asked for job in jobs]))
    ended = vllm_programs.run(python, "vllm_said.py", [str(path)])
    outs = [Path(job.asked["out"]) for job in jobs]
    died = {"error": f"the process ended: {ended.stderr[-3000:]}"}
    return [json.loads(out.read_text()) if out.exists() else died for out in outs]


def problems_of(job: Job, found: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with vLLM's results, or why there are none."""
    if "error" in found:
        return [found["error"]]
    problems = [
        f"{what} gives log-probs that are off by {gap:.2g}"
        for what, gap in zip(WAYS, gaps_of(job, found), strict=False)
        if not gap <= GAPS[job.dtype]
    ]
    for rows, manifest in zip(found["rows"], job.manifests, strict=True):
        try:
            combine([rows], manifest)
        except InternalError as error:
            problems.append(f"version {manifest.version}: {error.message}")
    return problems


def gaps_of(job: Job, found: Mapping[str, Any]) -> list[float]:
    """Return how far vLLM's log-probs are from transformers', by `WAYS`, as `GAPS` says it."""
    pairs = zip(found["said"], job.wanted, strict=True)
    gaps = [(torch.tensor(said) - wanted).abs() for said, wanted in pairs]
    return [float(gap.max() if job.dtype == torch.float32 else gap.mean()) for gap in gaps]


def _outcome(job: Job, found: Mapping[str, Any]) -> str:
    """Return `yes`, or the problems."""
    if "said" in found and not (own := gaps_of(job, found)[0]) <= GAPS[job.dtype]:
        return f"no: what vLLM itself loads of the directory is off by {own:.2g}"
    return "; ".join(problem.splitlines()[-1][-300:] for problem in problems_of(job, found)) or "yes"


def rows_of(names: Sequence[str], *, python: str) -> None:
    """Print the rows of some families."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        jobs = [make_job(name, place / f"{name} {dtype}", dtype=dtype) for name in names for dtype in formats_of(name)]
        for job, found in zip(jobs, on_vllm(jobs, place, python=python), strict=True):
            outcome = _outcome(job, found)
            gap = "" if "error" in found else f"{max(gaps_of(job, found)):.0e}"
            tied = ", tied" if job.name in TIED else ""
            kind = str(job.dtype).removeprefix("torch.")
            print(f"| {job.name}{tied} | {kind} | `{found.get('class', '')}` | {gap} | {outcome} |", flush=True)


def main(python: str, names: Sequence[str]) -> None:
    """Print the table."""
    import transformers

    transformers.logging.set_verbosity_error()  # pyright: ignore[reportPrivateImportUsage]
    transformers.utils.logging.disable_progress_bar()
    print("| model | format | vLLM's class | gap | round trip |\n|---|---|---|---|---|")
    for first in range(0, len(names), _AT_A_TIME):
        rows_of(names[first : first + _AT_A_TIME], python=python)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or [*FAMILIES, *OTHERS])
