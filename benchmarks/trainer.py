"""Our training step against the bare limit, transformers' Trainer and TRL's GRPOTrainer, each in a process of its own.

    python benchmarks/trainer.py [--peers-python PATH] [--models 30M 150M moe] [--seq-lens 512 4096]
        [--vocabularies 1000 150000] [--lengths fixed variable] [--rounds 3] [--tokens 1024] [--device cpu|cuda]

    python -m venv .venv-peers
    .venv-peers/bin/pip install -e '.[trainer]' trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0

`limit` is a loop by hand over the same rows of tokens: forward, backward, clipping, AdamW; a large vocabulary goes
through the same head in chunks. `ours` is the step of `millrace trainer --bench`. `trainer` is transformers' Trainer on
rows of equal lengths, `grpo` the loss, backward and optimizer of TRL's GRPOTrainer on samples of variable lengths,
which it pads, without its generation; without --peers-python these two are left out. All compute in float32 on one
thread, or with --device cuda in bfloat16 with float32 weights, where time is wall time and memory the allocator's. A
step of short samples warms up, on a GPU three steps like the others.

One cell is a model, a longest sample, a vocabulary and a kind of lengths; contenders take turns within a cell, round by
round. What is measured is appended to `trainer.jsonl` among the results at once, and a run that is started again goes
on behind it; `trainer.md` is made from it. CPU seconds tell more than wall time on a shared machine. All cells take
three hours of one core.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from report import progress, table

RESULTS = Path(__file__).parent / "results"
CONTENDERS = ("limit", "ours", "trainer", "grpo")
PEERS = {"trainer": "fixed", "grpo": "variable"}
"""Each on the lengths that it is compared on."""
WARM_UP_TOKENS = 64
GPU_STEPS, GPU_WARM_UPS = 8, 3
"""Steps of a round behind the first one, and how many of all only warm up."""
LARGE_VOCABULARY = 100_000
CELL_TIMEOUT_S = 3600
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9},
    "150M": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12},
    "moe": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 1}

Cell = dict[str, Any]
Step = Callable[[int], int]
"""Takes a step and gives the tokens that it learned from, without padding."""


def make_model(cell: Cell, directory: Path) -> None:
    """A model without knowledge, in `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(0)
    shape = SHAPES[cell["model"]]
    heads = {"num_attention_heads": shape["hidden_size"] // 64 or 1, "num_key_value_heads": 1, "head_dim": 64}
    common = {**shape, **heads, "vocab_size": cell["vocabulary"], "tie_word_embeddings": True}
    config = Qwen3MoeConfig(**common, **EXPERTS) if cell["model"] == "moe" else Qwen3Config(**common)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def bench_of(cell: Cell, directory: Path) -> Any:
    """What `millrace trainer --bench` would ask."""
    from millrace.config.sections.bench import TrainerBench

    model = {"name": str(directory), "seq_len": cell["seq_len"]}
    return TrainerBench.model_validate(
        {
            "trainer": {"model": model, "micro_batch_tokens": max(4096, cell["seq_len"]), "optim": {"lr": 1e-5}},
            "data": {"type": cell["lengths"], "batch_size": samples_of(cell), "seq_len": cell["seq_len"]},
            "steps": steps_of(cell),
        }
    )


def samples_of(cell: Cell) -> int:
    """Samples of a step: enough where lengths vary, so that what pads them pads as it would in a batch."""
    few = max(cell["tokens"] // cell["seq_len"], 1)
    return few if cell["lengths"] == "fixed" else max(few, 8 if cell["seq_len"] <= 1024 else 4)


def rows_of(cell: Cell) -> int:
    """Rows of a micro-batch."""
    return min(max(4096 // cell["seq_len"], 1), samples_of(cell))


def steps_of(cell: Cell) -> int:
    """Steps of a round behind the first one: one where it is long enough by itself."""
    if is_on_gpu(cell):
        return GPU_STEPS
    return 2 if cell["seq_len"] * samples_of(cell) <= 2048 else 1


def is_on_gpu(cell: Cell) -> bool:
    """Whether a cell is of a GPU; those of CPUs do not say so."""
    return "device" in cell


def device_of(cell: Cell) -> Any:
    """Where a cell is computed, for torch."""
    import torch

    return torch.device(cell.get("device", "cpu"))


def half_precision(cell: Cell) -> Any:
    """The block in which a peer's forward runs: bfloat16 on a GPU."""
    import torch

    return torch.autocast("cuda", torch.bfloat16) if is_on_gpu(cell) else nullcontext()


def samples(cell: Cell, step: int) -> list[Any]:
    """Those that every contender learns from; step 0 warms up."""
    from millrace.trainer.bench.data import fake_samples

    return fake_samples(data_of(cell, step), step=step, seed=0, vocabulary=cell["vocabulary"])


def data_of(cell: Cell, step: int) -> Any:
    """What the samples of a step are like."""
    data = bench_of(cell, Path()).data
    return data if step or is_on_gpu(cell) else data.model_copy(update={"seq_len": WARM_UP_TOKENS, "type": "fixed"})


def ours(cell: Cell, directory: Path) -> list[dict[str, Any]]:
    """Our step, by our own bench."""
    from millrace.trainer.bench import measure as bench
    from millrace.trainer.bench.measure import measure
    from millrace.trainer.gang.distributed import Gang

    gang = Gang(device=device_of(cell))
    bench.fake_samples = lambda data, *, step, **rest: samples(cell, step)  # warm up as the others do
    steps = measure(bench_of(cell, directory), gang=gang, on_step=lambda step: None)
    gang.leave()
    return [step.to_json() for step in steps[GPU_WARM_UPS - 1 if is_on_gpu(cell) else 0 :]]


def limit(cell: Cell, directory: Path) -> list[dict[str, Any]]:
    """Forward, backward and AdamW, and nothing else."""
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    from millrace.trainer.bench.data import fake_batch
    from millrace.trainer.gang.distributed import Gang
    from millrace.trainer.learning.batch import BatchLayout
    from millrace.trainer.learning.head import Targets, linear_logprobs
    from millrace.trainer.learning.packing import packing_of
    from millrace.trainer.model.attention import lengths_of_samples

    torch.set_num_threads(1)
    device = device_of(cell)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(device)
    config, gang = bench_of(cell, directory).trainer, Gang(device=device)
    with half_precision(cell):
        compute_dtype = torch.bfloat16 if is_on_gpu(cell) else torch.float32
        packing = packing_of(model, config.pack, compute_dtype=compute_dtype, gang=gang)
    layout = BatchLayout.of(config, packing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def loss_of(rows: Any, micro_batch: Any, count: int) -> torch.Tensor:
        places = {"input_ids": rows.token_ids_RL, "position_ids": rows.position_ids_RL, "use_cache": False}
        places |= lengths_of_samples(model, rows.position_ids_RL)
        labels_N = micro_batch.token_ids_BT.reshape(-1)[rows.scored_N]
        hidden_NH = model.model(**places).last_hidden_state.flatten(0, 1)[rows.before_N]
        if cell["vocabulary"] < LARGE_VOCABULARY:
            return functional.cross_entropy(model.lm_head(hidden_NH), labels_N, reduction="sum") / count
        ones_N = torch.ones(len(labels_N), device=device)
        targets = Targets(places_N=rows.before_N, labels_N=labels_N, temperature_N=ones_N, is_entropy_learned=False)
        return -linear_logprobs(hidden_NH, model.lm_head.weight, targets=targets)[:, 0].sum() / count

    def step(number: int) -> int:
        batch = fake_batch(samples(cell, number), step=number, layout=layout, gang=gang)
        count = sum(len(each.rows.scored_N) for each in batch.micro_batches)
        for micro_batch in batch.micro_batches:
            with half_precision(cell):
                loss = loss_of(micro_batch.rows, micro_batch, count)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return batch.header.num_tokens

    return timed(step, cell)


def trainer(cell: Cell, directory: Path) -> list[dict[str, Any]]:
    """transformers' Trainer on rows of equal lengths, padded where samples are not."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = rows_of(cell)
    parts = max(samples_of(cell) // rows, 1)
    numbers = range(steps_of(cell) + 1)
    items = [sample.token_ids for number in numbers for sample in samples(cell, number)[: rows * parts]]

    def collate(chosen: Sequence[int]) -> dict[str, torch.Tensor]:
        found = [torch.from_numpy(items[index]).long() for index in chosen]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(found, batch_first=True),
            "attention_mask": pad([torch.ones_like(each) for each in found], batch_first=True),
            "labels": pad(found, batch_first=True, padding_value=-100),
        }

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=parts,
            max_steps=steps_of(cell) + 1,
            learning_rate=1e-5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
            use_cpu=not is_on_gpu(cell),
            bf16=is_on_gpu(cell),
            remove_unused_columns=False,
        )
        clock = _Clock(cell)
        peer = Trainer(
            model=model,
            args=arguments,
            train_dataset=list(range(len(items))),  # pyright: ignore[reportArgumentType] - a list is one
            data_collator=collate,
            callbacks=[clock.callback()],
        )
        peer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(items)  # type: ignore[method-assign]
        peer.train()
    tokens = [sum(map(len, items[start : start + rows * parts])) for start in range(0, len(items), rows * parts)]
    return clock.steps(tokens)


def grpo(cell: Cell, directory: Path) -> list[dict[str, Any]]:
    """TRL's loss, backward and optimizer; its generation and its rewards are left out."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b", unk_token="c")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = rows_of(cell)
    with tempfile.TemporaryDirectory() as output:
        peer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **rest: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=2,
                num_generations=2,
                use_cpu=not is_on_gpu(cell),
                bf16=is_on_gpu(cell),
                gradient_checkpointing=False,
                report_to=[],
                beta=0.0,
                max_completion_length=cell["seq_len"],
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
            processing_class=tokenizer,
        )
    peer.model.train()
    peer.current_gradient_accumulation_steps = max(samples_of(cell) // rows, 1)
    optimizer = torch.optim.AdamW(peer.model.parameters(), lr=1e-5, fused=True)  # its default

    def step(number: int) -> int:
        chosen = samples(cell, number)
        for start in range(0, len(chosen), rows):
            with half_precision(cell):
                loss = peer.compute_loss(peer.model, _padded(chosen[start : start + rows], device_of(cell)))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(len(sample.token_ids) for sample in chosen)

    return timed(step, cell)


def _padded(chosen: Sequence[Any], device: Any) -> dict[str, Any]:
    """What GRPOTrainer's loss takes: prompts of one token, and completions of the rest."""
    import torch

    pad = torch.nn.utils.rnn.pad_sequence
    token_ids = [torch.from_numpy(sample.token_ids).long() for sample in chosen]
    mask = pad([torch.ones(len(each) - 1, dtype=torch.long) for each in token_ids], batch_first=True)
    inputs = {
        "prompt_ids": torch.stack([each[:1] for each in token_ids]),
        "prompt_mask": torch.ones(len(token_ids), 1, dtype=torch.long),
        "completion_ids": pad([each[1:] for each in token_ids], batch_first=True),
        "completion_mask": mask,
        "advantages": torch.ones(len(token_ids)),
        "num_items_in_batch": mask.sum(),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def timed(step: Step, cell: Cell) -> list[dict[str, Any]]:
    """Steps, of which the first warms up and is not counted."""
    import torch

    from millrace.trainer.bench.memory import PeakMemory

    memory, found = PeakMemory(device_of(cell)), list[dict[str, Any]]()
    for number in range(steps_of(cell) + 1):
        cpu_began, began = time.process_time(), time.perf_counter()
        num_tokens = step(number)
        if is_on_gpu(cell):
            torch.cuda.synchronize()
        found.append(
            {
                "num_tokens": num_tokens,
                "seconds": time.perf_counter() - began,
                "cpu_s": time.process_time() - cpu_began,
                "peak_bytes": memory.peak,
            }
        )
    return found[GPU_WARM_UPS if is_on_gpu(cell) else 1 :]


class _Clock:
    """Times the steps of transformers' Trainer, from its callbacks."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._found = list[dict[str, Any]]()

    def callback(self) -> Any:
        """What the trainer calls."""
        import torch
        from transformers import TrainerCallback

        from millrace.trainer.bench.memory import PeakMemory

        clock, memory = self, PeakMemory(device_of(self._cell))

        class Callback(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                self.began = time.perf_counter(), time.process_time()

            def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                if is_on_gpu(clock._cell):
                    torch.cuda.synchronize()
                seconds, cpu_s = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
                clock._found.append({"seconds": seconds, "cpu_s": cpu_s, "peak_bytes": memory.peak})

        return Callback()

    def steps(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Those that count."""
        steps = [{**each, "num_tokens": count} for each, count in zip(self._found, tokens, strict=True)]
        return steps[GPU_WARM_UPS if is_on_gpu(self._cell) else 1 :]


def work(cell: Cell) -> None:
    """In a process of its own: measure one contender, and print what was found."""
    contenders = {"ours": ours, "limit": limit, "trainer": trainer, "grpo": grpo}
    with tempfile.TemporaryDirectory() as directory:
        # Made in another process, so that its memory is not counted.
        subprocess.run([sys.executable, __file__, "--make", json.dumps([cell, directory])], check=True)
        steps = contenders[cell["contender"]](cell, Path(directory))
    step_s = median(step["seconds"] / step["num_tokens"] for step in steps)
    print(
        json.dumps(
            {
                "tokens_per_s": 1 / step_s,
                "tokens_per_cpu_s": 1 / median(step["cpu_s"] / step["num_tokens"] for step in steps),
                "peak_bytes": max(step["peak_bytes"] for step in steps),
                "phases": {
                    name: median(step[f"{name}_s"] for step in steps)
                    for name in ("data", "forward", "backward", "optimizer")
                    if f"{name}_s" in steps[0]
                },
            }
        )
    )


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Every contender of every cell, round by round; the largest cell once."""
    for model in options.models:
        for seq_len in options.seq_lens:
            for vocabulary in options.vocabularies:
                for lengths in options.lengths:
                    is_largest = model == "150M" and seq_len >= 4096 and vocabulary >= LARGE_VOCABULARY
                    for number in range(1 if is_largest else options.rounds):
                        peers = [peer for peer in PEERS if PEERS[peer] == lengths and options.peers_python]
                        for contender in ("limit", "ours", *peers):
                            yield {
                                "model": model,
                                "seq_len": seq_len,
                                "vocabulary": vocabulary,
                                "lengths": lengths,
                                "tokens": options.tokens,
                                "round": number,
                                "contender": contender,
                                **({"device": "cuda"} if options.device == "cuda" else {}),
                            }


def measure_cell(cell: Cell, python: str) -> dict[str, Any]:
    """What a process of its own finds; its error instead if it fails."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, "--work", json.dumps(cell)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CELL_TIMEOUT_S, env=environ)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {CELL_TIMEOUT_S} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def write_report(records: Sequence[dict[str, Any]]) -> None:
    """The table of medians over rounds."""
    found = defaultdict[tuple[Any, ...], dict[str, list[dict[str, Any]]]](lambda: defaultdict(list))
    for record in records:
        cell = record["cell"]
        key = (
            *(cell[name] for name in ("model", "seq_len", "vocabulary", "lengths", "tokens")),
            cell.get("device", "cpu"),
        )
        found[key][cell["contender"]].append(record["found"])
    rows = [row for key, by in found.items() for row in _rows(key, by)]
    head = ["on", "model", "longest", "vocabulary", "lengths", "who", "rounds", "tokens/s", "tokens/CPU s"]
    text = table([*head, "of ours", "peak GiB", "our phases: data, forward, backward, optimizer"], rows)
    about = " ".join((__doc__ or "").split("\n\n")[3].split())
    (RESULTS / "trainer.md").write_text(f"# Training steps\n\nMade by `benchmarks/trainer.py`. {about}\n\n{text}\n")


def _rows(key: tuple[Any, ...], by: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    def middle(who: str, what: str) -> float | None:
        values = [each[what] for each in by.get(who, []) if what in each]
        return median(values) if values else None

    clock = "tokens_per_s" if key[-1] == "cuda" else "tokens_per_cpu_s"
    own = middle("ours", clock)
    for who in CONTENDERS:
        if not (results := by.get(who)):
            continue
        cpu, wall, peak = (middle(who, what) for what in ("tokens_per_cpu_s", "tokens_per_s", "peak_bytes"))
        if cpu is None or wall is None or peak is None:
            yield [key[-1], *map(str, key[:4]), who, str(len(results)), results[-1]["error"], "", "", "", ""]
            continue
        phases = ", ".join(f"{seconds:.3f}" for seconds in results[-1].get("phases", {}).values())
        share = "" if own is None else f"{(wall if key[-1] == 'cuda' else cpu) / own:.2f}"
        figures = [f"{wall:,.0f}", f"{cpu:,.0f}", share, f"{peak / 2**30:.2f}", phases]
        yield [key[-1], *map(str, key[:4]), who, str(len(results)), *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["30M", "150M", "moe"])
    parser.add_argument("--seq-lens", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[1000, 150_000])
    parser.add_argument("--lengths", nargs="+", choices=["fixed", "variable"], default=["fixed", "variable"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, with fixed lengths; one sample at least")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peers-python", help="an interpreter that has TRL, transformers and millrace")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        cell, directory = json.loads(options.make)
        make_model(cell, Path(directory))
        return
    if options.work:
        work(json.loads(options.work))
        return
    path = RESULTS / "trainer.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = [record["cell"] for record in records if "error" not in record["found"]]
    for cell in cells(options):
        if cell in done:
            continue
        progress(" ".join(str(value) for value in cell.values()))
        found = measure_cell(cell, options.peers_python if cell["contender"] in PEERS else sys.executable)
        records = [record for record in records if record["cell"] != cell] + [{"cell": cell, "found": found}]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        write_report(records)
    write_report(records)
    print((RESULTS / "trainer.md").read_text())


if __name__ == "__main__":
    main()
