"""Those whose training steps `trainer.py` compares. Each is a process that takes its turns when it is told to.

`python trainer_contenders.py CELL DIRECTORY` loads the model in DIRECTORY, takes the steps that warm up, says so by a
line of JSON, and takes one turn for each line that it reads.

What a cell has: `model`, `seq_len`, `vocabulary`, `lengths`, `tokens` of a step, `rounds`, `contender`, whether a whole
step warms it up (`is_warm`) and one more step is `profiled`, and `device` if that is a GPU.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from millrace.config.sections.rl import TrainerBench
from millrace.trainer.bench import SHORTEST, PeakMemory, fake_batch, fake_samples
from millrace.trainer.gang.distributed import Gang

WARM_UP_TOKENS = 64
GPU_STEPS, GPU_WARM_UPS = 5, 3
"""Steps of a turn, and before the first one."""
LARGE_VOCABULARY = 100_000
ROW_TOKENS = 4096
"""Of a micro-batch; one sample at least."""

Cell = dict[str, Any]
Step = Callable[[int], int]
"""Takes a step and gives the tokens that it learned from, without padding."""


class Turns:
    """Hears of every step, and lets the next one begin when this contender's turn has come."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._warm_ups, self._rounds = warm_ups_of(cell), cell["rounds"]
        self._steps: list[dict[str, Any]] = []
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._is_profiling = False
        # What libraries print must not stand among the answers.
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def after_step(self, step: dict[str, Any]) -> None:
        """`step` has num_tokens, seconds, cpu_s, peak_bytes, and of ours the seconds of its phases."""
        if self._is_profiling:
            self._profile.stop()
            self._answer({"profile": self._longest()})
            return
        if self._warm_ups:
            self._warm_ups -= 1
            if not self._warm_ups:
                self._answer({})
                self._wait()
            return
        self._steps.append(step)
        if len(self._steps) == steps_of_turn(self._cell):
            self._rounds -= 1
            self._answer(_found(self._steps))
            self._steps = []
            if self._rounds or self._cell["profiled"]:
                self._wait()
            if not self._rounds and self._cell["profiled"]:
                self._is_profiling = True
                self._profile.start()

    def _longest(self) -> dict[str, float]:
        """Operators that took most of the CPU's time by themselves, with their shares of all."""
        events = sorted(self._profile.key_averages(), key=lambda each: -each.self_cpu_time_total)
        total = sum(each.self_cpu_time_total for each in events)
        return {each.key: round(each.self_cpu_time_total / total, 4) for each in events[:10]}

    def _answer(self, found: dict[str, Any]) -> None:
        print(json.dumps(found | {"process_cpu_s": time.process_time()}), file=self._answers, flush=True)

    def _wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("nobody asks for another turn")


def _found(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the steps of a turn."""
    phases = [name for name in ("data_s", "forward_s", "backward_s", "optimizer_s") if name in steps[0]]
    return {
        "tokens_per_s": 1 / median(step["seconds"] / step["num_tokens"] for step in steps),
        "tokens_per_cpu_s": 1 / median(step["cpu_s"] / step["num_tokens"] for step in steps),
        "peak_bytes": max(step["peak_bytes"] for step in steps),
        "phases": {name.removesuffix("_s"): median(step[name] for step in steps) for name in phases},
    }


def bench_of(cell: Cell, directory: Path) -> TrainerBench:
    """What `millrace trainer --bench` would ask."""
    model = {"name": str(directory), "seq_len": cell["seq_len"]}
    trainer = {"model": model, "micro_batch_tokens": max(ROW_TOKENS, cell["seq_len"]), "optim": {"lr": 1e-5}}
    data = {"type": "fixed", "batch_size": samples_of(cell), "seq_len": cell["seq_len"]}
    return TrainerBench.model_validate({"trainer": trainer, "data": data, "steps": steps_of(cell) - 1})


def samples_of(cell: Cell) -> int:
    """Samples of a step: several where lengths vary, or rows would be filled worse than those of a batch of many."""
    few = max(cell["tokens"] // cell["seq_len"], 1)
    return few if cell["lengths"] == "fixed" else max(few, 8 if cell["seq_len"] <= 1024 else 2)


def rows_of(cell: Cell) -> int:
    """Rows of a micro-batch."""
    return min(max(ROW_TOKENS // cell["seq_len"], 1), samples_of(cell))


def warm_ups_of(cell: Cell) -> int:
    """Steps before the first turn: on a CPU one of short samples, and one like the others if there is time for it."""
    return GPU_WARM_UPS if is_on_gpu(cell) else 1 + cell["is_warm"]


def steps_of_turn(cell: Cell) -> int:
    """Steps that a turn takes: one on a CPU where it is long enough by itself."""
    return GPU_STEPS if is_on_gpu(cell) else 1 + (cell["is_warm"] and cell["seq_len"] <= 1024)


def steps_of(cell: Cell) -> int:
    """Steps in all."""
    return warm_ups_of(cell) + cell["rounds"] * steps_of_turn(cell) + cell["profiled"]


def is_on_gpu(cell: Cell) -> bool:
    """Whether a cell is of a GPU; those of CPUs do not say so."""
    return "device" in cell


def device_of(cell: Cell) -> torch.device:
    """Where a cell is computed."""
    return torch.device(cell.get("device", "cpu"))


def half_precision(cell: Cell) -> Any:
    """The block in which a peer's forward runs: bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if is_on_gpu(cell) else nullcontext()


def samples(cell: Cell, step: int) -> list[Any]:
    """Those that every contender learns from. Step 0 warms up.

    Where lengths vary they are spread evenly from 10 to 100 % of `seq_len`, because a few that are drawn would say
    little of what a batch of hundreds has: a mean of 55 %, and one that is as long as it may be.
    """
    count, longest = samples_of(cell), cell["seq_len"]
    if not step and not is_on_gpu(cell):
        lengths = [WARM_UP_TOKENS] * count
    elif cell["lengths"] == "fixed":
        lengths = [longest] * count
    else:
        lengths = [round(longest * (SHORTEST + (1 - SHORTEST) * place / (count - 1))) for place in range(count)]
    data = bench_of(cell, Path()).data
    found = []
    for place, length in enumerate(lengths):
        one = data.model_copy(update={"batch_size": 1, "seq_len": length})
        (sample,) = fake_samples(one, step=step, seed=place, vocabulary=cell["vocabulary"])
        found.append(replace(sample, ordinal=place))
    return found


def ours(cell: Cell, directory: Path, turns: Turns) -> None:
    """Our step, by our own bench."""
    from millrace.trainer import bench as bench

    bench.fake_samples = lambda data, *, step, **rest: samples(cell, step)  # the samples that the others have
    gang = Gang(device=device_of(cell))
    bench.measure(bench_of(cell, directory), gang=gang, on_step=lambda step: turns.after_step(step.to_json()))
    gang.leave()


def limit(cell: Cell, directory: Path, turns: Turns) -> None:
    """Forward, backward and AdamW, and nothing else, on the rows that our plan makes."""
    from torch.nn import functional

    from millrace.trainer.learning.batch import BatchLayout
    from millrace.trainer.learning.forward import Targets, linear_logprobs
    from millrace.trainer.learning.packing import packing_of
    from millrace.trainer.model.context_parallel import lengths_of_samples

    device = device_of(cell)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(device)
    config, gang = bench_of(cell, directory).trainer, Gang(device=device)
    with half_precision(cell):
        compute_dtype = torch.bfloat16 if is_on_gpu(cell) else torch.float32
        packing = packing_of(model, config.pack, longest=config.model.seq_len, compute_dtype=compute_dtype, gang=gang)
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

        def loss_of_tokens(both_N2: torch.Tensor) -> torch.Tensor:
            return -both_N2[:, 0].sum() / count

        def slopes(tokens: slice, both_C2: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                own_C2 = both_C2.requires_grad_()
                return torch.autograd.grad(loss_of_tokens(own_C2), own_C2)[0]

        targets = Targets(
            places_N=rows.before_N, labels_N=labels_N, temperature_N=ones_N, is_entropy_learned=False, slopes=slopes
        )
        return loss_of_tokens(linear_logprobs(hidden_NH, model.lm_head.weight, targets=targets))

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

    take_steps(step, cell, turns)


def trainer(cell: Cell, directory: Path, turns: Turns) -> None:
    """transformers' Trainer on rows of equal lengths."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = rows_of(cell)
    parts = max(samples_of(cell) // rows, 1)
    of_steps = [samples(cell, number)[: rows * parts] for number in range(steps_of(cell))]
    items = [sample.token_ids for of_step in of_steps for sample in of_step]
    tokens = [sum(len(sample.token_ids) for sample in of_step) for of_step in of_steps]
    memory = PeakMemory(device_of(cell))

    def collate(chosen: Sequence[int]) -> dict[str, torch.Tensor]:
        found = torch.stack([torch.from_numpy(items[index]).long() for index in chosen])
        return {"input_ids": found, "attention_mask": torch.ones_like(found), "labels": found}

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if is_on_gpu(cell):
                torch.cuda.synchronize()
            seconds, cpu_s = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            found = {"num_tokens": tokens[state.global_step - 1], "seconds": seconds, "cpu_s": cpu_s}
            turns.after_step(found | {"peak_bytes": memory.peak})

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=parts,
            max_steps=steps_of(cell),
            learning_rate=1e-5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
            use_cpu=not is_on_gpu(cell),
            bf16=is_on_gpu(cell),
            remove_unused_columns=False,
        )
        peer = Trainer(
            model=model,
            args=arguments,
            train_dataset=list(range(len(items))),  # pyright: ignore[reportArgumentType] - a list is one
            data_collator=collate,
            callbacks=[Clock()],
        )
        peer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(items)  # type: ignore[method-assign]
        peer.train()


def grpo(cell: Cell, directory: Path, turns: Turns) -> None:
    """TRL's loss, backward and optimizer; its generation and its rewards are left out."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

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
        inputs = _padded(chosen, device_of(cell))
        for start in range(0, len(chosen), rows):
            # Padded for the whole step and divided then, as GRPOTrainer does by `split_tensor_dict`.
            part = {name: value[start : start + rows] if value.ndim else value for name, value in inputs.items()}
            with half_precision(cell):
                loss = peer.compute_loss(peer.model, part)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(len(sample.token_ids) for sample in chosen)

    take_steps(step, cell, turns)


def _padded(chosen: Sequence[Any], device: torch.device) -> dict[str, torch.Tensor]:
    """What GRPOTrainer's loss takes: prompts of one token, and completions of the rest."""
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


def take_steps(step: Step, cell: Cell, turns: Turns) -> None:
    """All steps of a contender that has no loop of its own."""
    memory = PeakMemory(device_of(cell))
    for number in range(steps_of(cell)):
        cpu_began, began = time.process_time(), time.perf_counter()
        num_tokens = step(number)
        if is_on_gpu(cell):
            torch.cuda.synchronize()
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        found = {"num_tokens": num_tokens, "seconds": seconds, "cpu_s": cpu_s, "peak_bytes": memory.peak}
        turns.after_step(found)


def main() -> None:
    cell, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    {"ours": ours, "limit": limit, "trainer": trainer, "grpo": grpo}[cell["contender"]](cell, directory, Turns(cell))


if __name__ == "__main__":
    main()
