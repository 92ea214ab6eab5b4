"""CPU time of the embedded engine with many adapters on one base, beside one adapter and beside the base alone.

    OMP_NUM_THREADS=1 python benchmarks/adapters_served.py [--adapters 1 8 16] [--requests 64] [--tokens 48]

A model of 30 million parameters (512 wide, 9 layers, float32) generates for 64 requests at once; each adapter has rank
16 on every linear layer of the blocks, and requests are shared out among the adapters. "One after the other" runs the
requests of each adapter when those of the one before have ended, as an engine with one slot must. The kinds take turns;
printed are medians of sampled tokens per CPU second, and what an adapter adds to the memory of the process.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from report import progress, table
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from millrace.inference.embedded import loader
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import GenerateRequest, PolicyIdentity, SamplingParams
from millrace.policies.manifest import AdapterEntry, StagedPolicy
from millrace.policies.proof import held_digest

RANK = 16
BASE = PolicyIdentity(run_uid="", lineage=0, version=0)


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=512,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=1536,
        tie_word_embeddings=True,
        vocab_size=1000,
        max_position_embeddings=1024,
        dtype="float32",
    )
    return AutoModelForCausalLM.from_config(config).eval()


def make_adapter(model: torch.nn.Module, seed: int) -> StagedPolicy:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and "layers." in name:
            tensors[f"base_model.model.{name}.lora_A.weight"] = (
                torch.randn(RANK, layer.in_features, generator=generator) * 0.02
            )
            tensors[f"base_model.model.{name}.lora_B.weight"] = (
                torch.randn(layer.out_features, RANK, generator=generator) * 0.02
            )
    found = {name: loader.as_tensor_bytes(tensor) for name, tensor in tensors.items()}
    entry = AdapterEntry(
        rank=RANK, alpha=32.0, target_modules=(), modules_to_save=(), base_key="base", base_digest="", base_bytes=0
    )
    manifest: Any = SimpleNamespace(adapter=entry, probe=None, digest=held_digest(found))
    return StagedPolicy(manifest=manifest, tensors=found)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def measure(args: argparse.Namespace, directory: Path, model: torch.nn.Module) -> None:
    engine = EmbeddedEngine(max_num_seqs=args.requests, max_loras=max(args.adapters))
    await engine.load(directory, None, identity=BASE)
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(1000) for _ in range(16)) for _ in range(args.requests)]
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    identities = [PolicyIdentity(run_uid=f"run{n}", lineage=0, version=1) for n in range(max(args.adapters))]

    async def play(adapters: list[PolicyIdentity | None]) -> None:
        requests = [
            GenerateRequest(request_id=str(n), prompt_token_ids=prompts[n], sampling=sampling, adapter=adapter)
            for n, adapter in enumerate(adapters)
        ]
        await asyncio.gather(*(engine.generate(request) for request in requests))

    async def together(count: int) -> None:
        await play([identities[n * count // args.requests] if count else None for n in range(args.requests)])

    async def in_turn(count: int) -> None:
        for number in range(count):
            await play([identities[number]] * (args.requests // count))

    await play([None] * args.requests)
    before = resident_bytes()
    stagings = [make_adapter(model, number) for number in range(len(identities))]
    adapter_bytes = sum(len(tensor.data) for tensor in stagings[0].tensors.values())
    made = resident_bytes()
    began = time.process_time()
    for staged, identity in zip(stagings, identities, strict=True):
        await engine.add_adapter(staged, identity=identity)
    add_s = (time.process_time() - began) / len(identities)
    grown = (resident_bytes() - made) / len(identities)
    kinds: dict[str, Any] = {"base alone": (together, 0)}
    for count in args.adapters:
        kinds[f"{count} together"] = (together, count)
        if count > 1:
            kinds[f"{count} one after the other"] = (in_turn, count)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(args.rounds + 1):
        for kind, (run, count) in kinds.items():
            began = time.process_time()
            await run(count)
            if number:  # the first round warms up
                found[kind].append(args.requests * args.tokens / (time.process_time() - began))
        progress(f"round {number} of {args.rounds}")
    one = median(found["1 together"]) if "1 together" in found else float("nan")
    rows = [
        [kind, f"{median(all_):,.0f}", f"{min(all_):,.0f} to {max(all_):,.0f}", f"{median(all_) / one:.2f}"]
        for kind, all_ in found.items()
    ]
    print(table(["adapters", "tokens per CPU second", "from, to", "beside one adapter"], rows))
    print(
        f"an adapter has {adapter_bytes / 1e6:.1f} MB; one more adds {grown / 1e6:.1f} MB to the process "
        f"({before / 1e6:.0f} MB with the base) and takes {add_s * 1e3:.0f} ms of CPU to put in and prove"
    )
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        asyncio.run(measure(args, Path(directory), model))


if __name__ == "__main__":
    main()
