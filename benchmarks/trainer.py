"""Our training step against the bare limit, transformers' Trainer and TRL's GRPOTrainer, each in a process of its own.

    python benchmarks/trainer.py [--peers-python PATH] [--before DIR] [--models 30M 150M moe] [--seq-lens 512 4096]
        [--vocabularies 1000 150000] [--lengths fixed variable] [--rounds 3] [--tokens 1024] [--jobs N]
        [--device cpu|cuda]

    python -m venv .venv-peers
    .venv-peers/bin/pip install -e '.[trainer]' trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0

`limit` is a loop by hand over the same rows of tokens: forward, backward, clipping, AdamW; a large vocabulary goes
through the same head in chunks. `ours` is the step of `millrace trainer --bench`. `trainer` is transformers' Trainer on
rows of equal lengths, `grpo` the loss, backward and optimizer of TRL's GRPOTrainer on samples of 10 to 100 % of the
longest, which it pads, without its generation; without --peers-python these two are left out. `before` is the step of
another checkout of ours, DIR, with its own `.venv`. All compute in float32,
or with --device cuda in bfloat16 with float32 weights, where time is wall time and memory the allocator's. A step of
short samples warms up, and one like the others where contenders stay in memory; on a GPU three of these.

One cell is a model, a longest sample, a vocabulary and a kind of lengths. Its contenders take turns of one step, round
by round, so that all of them see the machine in the same state. Cells run side by side on one thread each, one per
core, and their contenders stay in memory (and take two steps of up to 1,024 tokens); one that takes more than half of
the memory runs alone on all cores, and its contenders start anew for each turn. A cell that is done is appended to
`trainer.jsonl` among the results, and a run that is started again goes on behind it; `trainer.md` is made from it. CPU
seconds tell more than wall time on a shared machine.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from report import machine, progress, table

RESULTS = Path(__file__).parent / "results"
CONTENDERS = Path(__file__).parent / "trainer_contenders.py"
PEERS = {"trainer": "fixed", "grpo": "variable"}
"""Each on the lengths that it is compared on."""
TURN_TIMEOUT_S = 1800
LARGE_VOCABULARY = 100_000
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9},
    "150M": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12},
    "moe": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 1}
PROFILED_SEQ_LEN = 512
MEMORY_SHARE = 0.85
"""Of the machine's."""

Cell = dict[str, Any]


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


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """All that is asked for; the largest cell takes one round."""
    device = {"device": "cuda"} if options.device == "cuda" else {}
    for model in options.models:
        for seq_len in options.seq_lens:
            for vocabulary in options.vocabularies:
                for lengths in options.lengths:
                    is_largest = model == "150M" and seq_len >= 4096 and vocabulary >= LARGE_VOCABULARY
                    shape = {"model": model, "seq_len": seq_len, "vocabulary": vocabulary, "lengths": lengths}
                    rounds = 1 if is_largest else options.rounds
                    yield {**shape, "tokens": options.tokens, "rounds": rounds, **device}


def bytes_of(cell: Cell) -> int:
    """Roughly what the contenders of a cell take together: those that wait keep what they have needed at most."""
    shape = SHAPES[cell["model"]]
    experts = EXPERTS["num_experts"] * 3 * shape["hidden_size"] * EXPERTS["moe_intermediate_size"]
    dense = 3 * shape["hidden_size"] * shape["intermediate_size"]
    layer = 2 * shape["hidden_size"] ** 2 + (experts if cell["model"] == "moe" else dense)
    parameters = cell["vocabulary"] * shape["hidden_size"] + shape["num_hidden_layers"] * layer
    tokens = max(cell["seq_len"], min(cell["tokens"], 4096))
    activations = tokens * shape["num_hidden_layers"] * shape["hidden_size"] * 4 * 40
    return 3 * (16 * parameters + 2**29 + 4 * 4 * tokens * cell["vocabulary"] + activations)


def takes_all_cores(cell: Cell) -> bool:
    """Whether a cell has no room beside another one, nor its contenders beside each other."""
    return bytes_of(cell) > allowed_bytes() / 2


def allowed_bytes() -> float:
    """For all cells that run side by side."""
    return MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Contender:
    """A process of `trainer_contenders.py` that waits for its turns; a context manager that ends it."""

    def __init__(self, cell: Cell, directory: str, command: Sequence[str], threads: int) -> None:
        # Threads that have nothing to do do not spin, which would count as CPU seconds.
        environ = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed where the process is ended
        self._process = subprocess.Popen(
            [*command, json.dumps(cell), directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environ,
        )
        self.cpu_s = 0.0

    def answer(self) -> dict[str, Any]:
        """What it says of the turn that it has taken, or of its start. RuntimeError with its last words if it fails."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], TURN_TIMEOUT_S)
        if not ready:
            raise RuntimeError(f"not done within {TURN_TIMEOUT_S} s")
        if not (line := self._process.stdout.readline()):
            code = self._process.wait(timeout=60)
            self._errors.seek(0)
            raise RuntimeError((self._errors.read().strip().splitlines() or [f"exit code {code}"])[-1][:300])
        found = json.loads(line)
        self.cpu_s = found.pop("process_cpu_s")
        return found

    def take_turn(self) -> dict[str, Any]:
        """The next one."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self.answer()

    def __enter__(self) -> "Contender":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Let go of its memory; the second time nothing."""
        self._process.kill()  # which is nothing to one that has ended
        self._process.wait(timeout=60)
        self._errors.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def commands_of(cell: Cell, options: argparse.Namespace) -> dict[str, list[str]]:
    """The contenders of a cell, each with the beginning of the command that starts it."""
    commands = {name: [sys.executable, str(CONTENDERS)] for name in ("limit", "ours")}
    if options.before:
        commands["before"] = [f"{options.before}/.venv/bin/python", f"{options.before}/benchmarks/{CONTENDERS.name}"]
    if options.peers_python:
        peers = (name for name, lengths in PEERS.items() if lengths == cell["lengths"])
        commands |= {name: [options.peers_python, str(CONTENDERS)] for name in peers}
    return commands


def measure_cell(cell: Cell, options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Turns of each contender, where the time of ours goes, and what all of it took; errors of those that failed."""
    commands = commands_of(cell, options)
    began, playing, cpu_s = time.monotonic(), dict[str, Contender](), 0.0
    turns, errors, profile = dict[str, list[dict[str, Any]]](), dict[str, str](), dict[str, float]()
    stay = not takes_all_cores(cell)

    def turn_of(name: str, directory: str, *, is_last: bool) -> None:
        """Starts it if it does not wait already."""
        profiled = name == "ours" and is_profiled(cell)
        if name not in playing:
            rounds = cell["rounds"] if stay else 1
            asked = {**cell, "rounds": rounds, "contender": "ours" if name == "before" else name}
            asked |= {"profiled": profiled and (stay or is_last), "is_warm": stay}
            playing[name] = ended.enter_context(Contender(asked, directory, commands[name], threads))
            playing[name].answer()
        turns.setdefault(name, []).append(playing[name].take_turn())
        if is_last and profiled:
            profile.update(playing[name].take_turn()["profile"])

    with ExitStack() as ended, tempfile.TemporaryDirectory() as directory:
        # In another process, whose memory is not counted.
        subprocess.run([sys.executable, __file__, "--make", json.dumps([cell, directory])], check=True)
        for number in range(cell["rounds"]):
            is_last = number == cell["rounds"] - 1
            for name in [name for name in commands if name not in errors]:
                try:
                    turn_of(name, directory, is_last=is_last)
                except (RuntimeError, BrokenPipeError) as error:
                    errors[name] = str(error)
                if is_last or name in errors or not stay:
                    contender = playing.pop(name)
                    contender.end()
                    cpu_s += contender.cpu_s
    return {
        "cell": cell,
        "date": date.today().isoformat(),
        "turns": turns,
        "errors": errors,
        "profile": profile,
        "threads": threads,
        "cpu_s": cpu_s,
        "wall_s": time.monotonic() - began,
    }


def is_profiled(cell: Cell) -> bool:
    """Whether ours takes one more step under torch's profiler; one of longer samples would take too long."""
    return cell["seq_len"] <= PROFILED_SEQ_LEN and "device" not in cell


def write_report(records: Sequence[dict[str, Any]]) -> None:
    """The tables: ratios to the goals, what each contender did, and where our step goes."""
    ratios = [_ratios(record) for record in records]
    steps = [row for record in records for row in _rows(record)]
    profiles = [
        [*_name(record["cell"]), ", ".join(f"{name} {share:.0%}" for name, share in record["profile"].items())]
        for record in records
        if record["profile"]
    ]
    named = ["model", "longest", "vocabulary", "lengths"]
    against = [f"{what} of {who}" for what in ("speed", "memory") for who in ("limit", "Trainer", "TRL", "before")]
    turns = [
        "threads",
        "who",
        "turns",
        "tokens/s",
        "tokens/CPU s",
        "peak GiB",
        "our phases, s: data, forward, backward, optimizer",
    ]
    hours = sum(record["cpu_s"] for record in records) / 3600
    text = [
        "# Training steps",
        f"Made by `benchmarks/trainer.py`. {' '.join((__doc__ or '').split(chr(10) * 2)[3].split())}",
        machine(),
        f"All cells took {hours:.2f} hours of CPU time.",
        "## Ours beside the others",
        "Tokens per CPU second (on a GPU per second) of ours divided by theirs, and peak memory likewise; medians.",
        table([*named, "measured", *against], ratios),
        "## Steps",
        table([*named, *turns], steps),
        "## Where our step goes",
        "Operators by their own share of the CPU's time in one more step, by torch's profiler.",
        table([*named, "shares"], profiles),
    ]
    (RESULTS / "trainer.md").write_text("\n\n".join(text) + "\n")


def _name(cell: Cell) -> list[str]:
    where = " (GPU)" if "device" in cell else ""
    return [cell["model"] + where, *(str(cell[name]) for name in ("seq_len", "vocabulary", "lengths"))]


def _middle(record: dict[str, Any], who: str, what: str) -> float | None:
    return median(each[what] for each in turns) if (turns := record["turns"].get(who)) else None


def _ratios(record: dict[str, Any]) -> list[str]:
    clock = "tokens_per_s" if "device" in record["cell"] else "tokens_per_cpu_s"
    row = [*_name(record["cell"]), record["date"]]
    for what in (clock, "peak_bytes"):
        own = _middle(record, "ours", what)
        for who in ("limit", *PEERS, "before"):
            other = _middle(record, who, what)
            row.append("" if own is None or other is None else f"{own / other:.2f}")
    return row


def _rows(record: dict[str, Any]) -> Iterator[list[Any]]:
    for who, turns in record["turns"].items():
        wall, cpu, peak = (
            _middle(record, who, what) or 0.0 for what in ("tokens_per_s", "tokens_per_cpu_s", "peak_bytes")
        )
        phases = ", ".join(f"{median(each['phases'][name] for each in turns):.3f}" for name in turns[0]["phases"])
        yield [
            *_name(record["cell"]),
            record["threads"],
            who,
            str(len(turns)),
            f"{wall:,.0f}",
            f"{cpu:,.0f}",
            f"{peak / 2**30:.2f}",
            phases,
        ]
    for who, error in record["errors"].items():
        yield [*_name(record["cell"]), record["threads"], who, "", error, "", "", ""]


def measure_all(waiting: list[Cell], *, jobs: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Records of cells as they get done: `jobs` side by side, as far as memory allows."""
    running: dict[Future[dict[str, Any]], Cell] = {}

    with ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            free = allowed_bytes() - sum(map(bytes_of, running.values()))
            fitting = [
                cell for cell in waiting if not running or (not takes_all_cores(cell) and bytes_of(cell) <= free)
            ]
            if fitting and len(running) < jobs and not any(map(takes_all_cores, running.values())):
                waiting.remove(fitting[0])
                threads = (os.cpu_count() or 1) if takes_all_cores(fitting[0]) else 1
                progress(f"{' '.join(_name(fitting[0]))}, {bytes_of(fitting[0]) / 2**30:.1f} GiB")
                running[pool.submit(measure_cell, fitting[0], options, threads)] = fitting[0]
                continue
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                progress(f"done: {' '.join(_name(running.pop(done)))}, {len(waiting)} wait")
                yield done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["30M", "150M", "moe"])
    parser.add_argument("--seq-lens", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[1000, 150_000])
    parser.add_argument("--lengths", nargs="+", choices=["fixed", "variable"], default=["fixed", "variable"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, with fixed lengths; one sample at least")
    parser.add_argument("--jobs", type=int, help="cells side by side, on a CPU one per core, on a GPU one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peers-python", help="an interpreter that has TRL, transformers and millrace")
    parser.add_argument("--before", help="another checkout of ours, with its .venv")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        cell, directory = json.loads(options.make)
        make_model(cell, Path(directory))
        return
    jobs = options.jobs or (1 if options.device == "cuda" else os.cpu_count() or 1)
    path = RESULTS / "trainer.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    asked = list(cells(options))
    done = [
        each["cell"]
        for each in records
        if not each["errors"] and commands_of(each["cell"], options).keys() <= each["turns"].keys()
    ]
    waiting = [cell for cell in asked if cell not in done]
    for found in measure_all(waiting, jobs=jobs, options=options):
        records = [record for record in records if record["cell"] != found["cell"]] + [found]
        # In the order in which they are asked for, whichever was done first.
        records.sort(key=lambda record: asked.index(record["cell"]) if record["cell"] in asked else -1)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        write_report(records)
    write_report(records)
    print((RESULTS / "trainer.md").read_text())


if __name__ == "__main__":
    main()
