"""Generation speed of the embedded engine against Hugging Face `generate`, in one process, on the tiny model.

    OMP_NUM_THREADS=1 python benchmarks/engine.py [--quick] [--concurrency 16 64 128] [--tokens 64] [--requests 8]

Both generate the same number of tokens per request (no end-of-sequence token) from prompts of 8 to 24 tokens, sampled
at temperature 1. The engine works through `requests` x concurrency requests that arrive at once, `generate` through
`requests` padded batches. Neither returns before every token is a Python-side result with its log-prob.
The full run takes one to two minutes on one core; --quick (concurrency 16, 16 tokens, 2 requests) ten seconds.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import torch
from report import progress, table
from transformers import AutoModelForCausalLM, Qwen3Config

from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import GenerateRequest, PolicyIdentity, SamplingParams


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=192,
        tie_word_embeddings=True,
        vocab_size=272,
        initializer_range=0.08,
        max_position_embeddings=2048,
        dtype="float32",
    )
    return AutoModelForCausalLM.from_config(config).eval()


def make_prompts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(256) for _ in range(rng.randint(8, 24))) for _ in range(count)]


async def run_engine(directory: Path, prompts: list[tuple[int, ...]], concurrency: int, num_tokens: int) -> float:
    """Tokens per second."""
    engine = EmbeddedEngine(max_num_seqs=concurrency)
    await engine.load(directory, None, identity=PolicyIdentity(run_uid="", lineage=0, version=0))
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)

    async def play(items: list[tuple[int, ...]]) -> int:
        results = await asyncio.gather(
            *(
                engine.generate(GenerateRequest(request_id=str(n), prompt_token_ids=item, sampling=sampling))
                for n, item in enumerate(items)
            )
        )
        return sum(len(result.token_ids) for result in results)

    await play(prompts[:concurrency])  # warm-up
    began = time.perf_counter()
    count = await play(prompts)
    rate = count / (time.perf_counter() - began)
    await engine.close()
    return rate


def run_generate(model: torch.nn.Module, prompts: list[tuple[int, ...]], concurrency: int, num_tokens: int) -> float:
    """Tokens per second."""

    def play(items: list[tuple[int, ...]]) -> int:
        longest = max(map(len, items))
        ids = torch.tensor([[0] * (longest - len(item)) + list(item) for item in items])
        mask = torch.tensor([[0] * (longest - len(item)) + [1] * len(item) for item in items])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            logprobs = torch.log_softmax(torch.stack(out.logits, 1), -1)
            new = out.sequences[:, longest:]
            return len(logprobs.gather(2, new[:, :, None]).flatten().tolist())

    play(prompts[:concurrency])  # warm-up
    began = time.perf_counter()
    count = sum(play(prompts[start : start + concurrency]) for start in range(0, len(prompts), concurrency))
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest of all three, unless given")
    parser.add_argument("--concurrency", type=int, nargs="+", default=None, help="default 16 64 128, 16 with --quick")
    parser.add_argument("--tokens", type=int, default=None, help="per request; default 64, 16 with --quick")
    parser.add_argument("--requests", type=int, default=None, help="times concurrency; default 8, 2 with --quick")
    options = parser.parse_args()
    levels = options.concurrency or ([16] if options.quick else [16, 64, 128])
    tokens = options.tokens or (16 if options.quick else 64)
    requests = options.requests or (2 if options.quick else 8)
    torch.set_num_threads(1)
    model = make_model()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        rows = []
        for concurrency in levels:
            progress(f"engine: concurrency {concurrency}")
            prompts = make_prompts(requests * concurrency)
            engine = asyncio.run(run_engine(Path(directory), prompts, concurrency, tokens))
            generate = run_generate(model, prompts, concurrency, tokens)
            rows.append([concurrency, f"{engine:.0f}", f"{generate:.0f}", f"{engine / generate:.2f}x"])
    title = f"## Embedded engine against `generate`: {tokens} tokens per request"
    print(f"{title}\n\n{table(['concurrency', 'engine tokens/s', 'generate tokens/s', 'ratio'], rows)}\n")


if __name__ == "__main__":
    main()
