"""Every layout of ranks against one rank: `python -m millrace_testing.trainer.equality` prints the table.

Each layout makes five steps of a tiny model from one start, saves a checkpoint after the second, and goes on from the
one that one rank saved there; one rank goes on from the layout's. All of that is compared with one rank's five steps.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from millrace.local.directory import free_port

STEPS, SAVED = 5, 2
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "FSDP 2": (2, {}),
    "TP 2": (2, {"tp": 2}),
    "CP 2": (2, {"cp": 2}),
    "EP 2": (2, {"ep": 2}),
    "FSDP 4": (4, {}),
    "HSDP 2x2": (4, {"dp_replicate": 2}),
    "FSDP 2 x TP 2": (4, {"tp": 2}),
    "FSDP 2 x CP 2": (4, {"cp": 2}),
    "CP 2 x TP 2": (4, {"cp": 2, "tp": 2}),
    "FSDP 2 x EP 2": (4, {"ep": 2}),
    "CP 2 x EP 4": (4, {"cp": 2, "ep": 4}),
    "HSDP 2 x EP 2": (4, {"dp_replicate": 2, "ep": 2}),
    "EP 2 x TP 2": (4, {"ep": 2, "tp": 2}),
}
_FEW = ("FSDP 2", "CP 2", "EP 2", "CP 2 x EP 4")
_NOT_IN_ALL: dict[str, tuple[str, ...]] = {
    "adamw, padded": _FEW,
    "adamw, adapters": (*_FEW, "HSDP 2x2"),
    "sgd": ("FSDP 2", "TP 2", "EP 2", "HSDP 2x2"),
}
"""The layouts of what is not tried in every one of them."""
MODELS = ("dense", "tied", "odd", "moe")
_OPTIM = {"lr": 1e-3, "max_norm": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, padded": {"pack": {"mode": "never"}},
    "adamw, adapters": {"model": {"lora": {"rank": 2}}},
    "muon": {"optim": {**_OPTIM, "type": "muon"}},
    "sgd": {"optim": {**_OPTIM, "type": "sgd", "lr": 0.1}},
}
"""What is trained with what; rows are packed unless they are padded."""
LIMITS = {kind: 1e-3 if kind == "muon" else 1e-5 for kind in KINDS}
LOGPROB_LIMITS = {**LIMITS, "muon": 2e-3}
"""Those of log-probs, in nats. They move about ten times as far as the weights do, in parts of the largest weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The largest differences from one rank: relative, but those of log-probs, which are absolute.

    Those of the policies are in parts of each tensor's largest value.
    """

    model: str
    kind: str
    layout: str
    loss: float
    grad_norm: float
    logprobs: float
    policy: float
    resumed: float
    back: float
    repeats: bool

    def is_within(self, times: float = 1.0) -> bool:
        """Return whether no difference is larger than its limit, taken so many times."""
        differences = (self.loss, self.grad_norm, self.policy, self.resumed, self.back)
        are_small = all(each <= times * LIMITS[self.kind] for each in differences)  # which nan is not
        return are_small and self.logprobs <= times * LOGPROB_LIMITS[self.kind]


def fits(model: str, kind: str, layout: str) -> bool:
    """Return whether a layout is one for a model: only that with experts shares these, and three heads only rows."""
    if layout not in _NOT_IN_ALL.get(kind, LAYOUTS):
        return False
    return not (model == "odd" and "TP" in layout) and (model == "moe" or "EP" not in layout)


def make_model(name: str, directory: Path) -> Path:
    """Write a tiny model; `odd` has three heads, which two ranks cannot share, and windows that slide."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3 if name == "odd" else 4,
        "num_key_value_heads": 3 if name == "odd" else 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "tie_word_embeddings": name == "tied",
        "eos_token_id": 1,
    }
    if name == "odd":
        sizes |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    target = directory / name
    if name == "moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)).save_pretrained(target)
    else:
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(target)
    return target


def job_of(
    directory: Path, layout: Mapping[str, int], /, *, first: int = 0, run: str = "u", **changes: Any
) -> dict[str, Any]:
    """Return what `layout_rank` makes of a model: steps from `first` on, from the checkpoint of `run` there."""
    # On a GPU the format would be bfloat16, whose rounding is far above the limits.
    changes["model"] = {"seq_len": 32, "dtype": "float32", **layout, **changes.get("model", {})}
    trainer = {"optim": _OPTIM, "pack": {"mode": "always"}}
    config = {
        "max_steps": 9,
        "seq_len": 32,
        "model": {"name": str(directory)},
        "trainer": {**trainer, **changes},
        "orchestrator": {"env": [{"id": "reverse-text"}], "batch_size": 8, "rollouts_per_example": 4},
    }
    return {"config": config, "first": first, "last": STEPS, "run": run, "saves": False}


def run_jobs(directory: Path, jobs: Mapping[str, dict[str, Any]], *, world_size: int) -> None:
    """Have a gang of so many do the jobs; RuntimeError if one fails."""
    directory.mkdir(exist_ok=True)
    for name, job in jobs.items():
        (directory / f"{name}.json").write_text(json.dumps(job))
    command = ["-m", "millrace_testing.trainer.layout_rank", str(directory)]
    if world_size > 1:
        gang = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--master-addr=127.0.0.1"]
        command = [*gang, f"--master-port={free_port()}", *command]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=1200)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-8000:])
    for name in jobs:
        (directory / f"{name}.json").unlink()
    if errors := [f"{path.name}: {path.read_text()}" for path in sorted(directory.glob("*.error-*"))]:
        raise RuntimeError("; ".join(errors))


def compare(directory: Path, models: Mapping[str, Path], *, layouts: Mapping[str, Any] = LAYOUTS) -> Iterator[Row]:
    """Yield the rows of the table, by model and kind; `directory` takes what is computed."""
    cells = {
        (name, kind, layout): (size, keys)
        for name in models
        for kind in KINDS
        for layout, (size, keys) in layouts.items()
        if fits(name, kind, layout)
    }
    alone: dict[str, dict[str, Any]] = {}
    for name, kind in {cell[:2]: None for cell in cells}:
        job = job_of(models[name], {}, run=_cell(name, kind, "one"), **KINDS[kind])
        alone |= {_cell(name, kind, "one"): job, _cell(name, kind, "one-short"): {**job, "last": SAVED, "saves": True}}
    run_jobs(directory, alone, world_size=1)
    for world_size in sorted({size for size, _ in cells.values()}):
        work: dict[str, dict[str, Any]] = {}
        for (name, kind, layout), (size, keys) in cells.items():
            if size == world_size:
                cell, changes = _cell(name, kind, layout), KINDS[kind]
                job = job_of(models[name], keys, run=cell, **changes)
                work |= {cell: job, f"{cell}-again": job, f"{cell}-short": {**job, "last": SAVED, "saves": True}}
                one = _cell(name, kind, "one")
                work[f"{cell}-resumed"] = job_of(models[name], keys, first=SAVED, run=one, **changes)
        run_jobs(directory, work, world_size=world_size)
    back = {
        f"{_cell(*cell)}-back": job_of(models[cell[0]], {}, first=SAVED, run=_cell(*cell), **KINDS[cell[1]])
        for cell in cells
    }
    run_jobs(directory, back, world_size=1)
    for cell in cells:
        yield _row(directory, *cell)


def _cell(model: str, kind: str, layout: str) -> str:
    return f"{model}-{kind}-{layout}".lower().replace(",", "").replace(" ", "")


def _row(directory: Path, model: str, kind: str, layout: str) -> Row:
    one, cell = directory / _cell(model, kind, "one"), directory / _cell(model, kind, layout)
    found, wanted = facts_of(cell), facts_of(one)
    for facts in (found, wanted):
        assert (facts["packed_rows"] > 0) == (kind != "adamw, padded"), f"{kind}: {facts['packed_rows']} packed rows"
    again = policy_of(cell.with_name(f"{cell.name}-again"))
    return Row(
        model=model,
        kind=kind,
        layout=layout,
        loss=_relative(found["loss"], wanted["loss"]),
        grad_norm=_relative(found["grad_norm"], wanted["grad_norm"]),
        logprobs=max(np.abs(tokens_of(cell)[key] - values).max() for key, values in tokens_of(one).items()),
        policy=difference(cell, one),
        resumed=difference(cell.with_name(f"{cell.name}-resumed"), one),
        back=difference(cell.with_name(f"{cell.name}-back"), one),
        repeats=all(np.array_equal(values, again[name]) for name, values in policy_of(cell).items()),
    )


def _relative(found: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) / max(abs(other), 1e-2) for one, other in zip(found, wanted, strict=True))


def facts_of(output: Path) -> dict[str, Any]:
    """Return what rank 0 measured."""
    return json.loads((output.parent / f"{output.name}.facts").read_text())


def tokens_of(output: Path) -> dict[str, np.ndarray]:
    """Return the log-probs by sample, behind the last step."""
    paths = list(output.parent.glob(f"{output.name}.*.tokens"))
    return {key: tensor.numpy() for path in paths for key, tensor in load_file(path).items()}


def difference(output: Path, expected: Path) -> float:
    """Return the largest difference of two policies, in parts of each tensor's largest value."""
    ours, theirs = policy_of(output), policy_of(expected)
    assert ours.keys() == theirs.keys()
    return float(np.max([np.abs(ours[name] - values).max() / np.abs(values).max() for name, values in theirs.items()]))


def policy_of(output: Path) -> dict[str, np.ndarray]:
    """Return the tensors that the ranks published parts of; every element by one rank."""
    facts = facts_of(output)
    parts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for path in sorted(output.parent.glob(f"{output.name}.*.safetensors")):
        for key, tensor in load_file(path).items():
            name, _, start = key.rpartition("@")
            parts.setdefault(name, []).append((int(start), tensor.numpy().ravel()))
    whole = {}
    for name, pieces in parts.items():
        pieces.sort(key=lambda piece: (piece[0], piece[1].size))
        ends = [start + values.size for start, values in pieces]
        assert [start for start, _ in pieces[1:]] == ends[:-1], f"the parts of {name} do not tile it"
        whole[name] = np.concatenate([values for _, values in pieces])
        assert name not in facts["shapes"] or whole[name].size == np.prod(facts["shapes"][name])
    return whole


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    heads = [
        "model",
        "trained with",
        "layout",
        "loss",
        "gradient norm",
        "log-probs",
        "policy",
        "resumed",
        "back",
        "bits",
    ]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        figures = (row.loss, row.grad_norm, row.logprobs, row.policy, row.resumed, row.back)
        numbers = [f"{figure:.1e}" for figure in figures]
        lines.append([row.model, row.kind, row.layout, *numbers, "repeat" if row.repeats else "DIFFER"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(names: list[str]) -> None:
    """Print the table of some models, or of all."""
    with tempfile.TemporaryDirectory() as scratch:
        models = {name: make_model(name, Path(scratch)) for name in names or MODELS}
        print(table(list(compare(Path(scratch) / "jobs", models))))


if __name__ == "__main__":
    main(sys.argv[1:])
