"""`--bench`: run one service alone for some steps, in supervised child processes, and print a table at the end."""

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from millrace.cli.errors import CliError
from millrace.cli.interrupts import Interrupts
from millrace.config.sections.inference import InferenceConfig
from millrace.config.sections.rl import DEFAULT_STEPS, FakeDataConfig, InferenceBench, TrainerBench
from millrace.config.sections.shared import WandbConfig
from millrace.config.sections.trainer import TrainerConfig
from millrace.errors import InvalidSpecError, Violation

Bench = TrainerBench | InferenceBench

_KEYS = ("type", "batch-size", "seq-len", "micro-batch-size")
_WORKERS = {
    TrainerBench: ("-m", "millrace.trainer.main", "bench", "--config"),
    InferenceBench: ("-m", "millrace.inference.embedded.bench", "--config"),
}


def flags(prefix: str = "") -> dict[str, bool]:
    """Return the flags of a bench that are not keys of the config, each with whether it takes a value.

    `prefix` comes before the flags of the fake samples.
    """
    return {"bench": False, "bench.steps": True, **{f"{prefix}data.fake.{key}": True for key in _KEYS}}


def is_bench(given: Mapping[str, str | bool], *, prefix: str = "") -> bool:
    """Return whether `--bench` is among the given flags; `prefix` comes before the flags of the fake samples.

    Raises InvalidSpecError if it is not, and other flags of a bench are.
    """
    if given.get("bench"):
        return True
    message = "is a flag of --bench: there are no fake samples in a run; add --bench, or leave it out"
    lost = [name for name in flags(prefix) if name != "bench" and name in given]
    if lost:
        raise InvalidSpecError([_violation(name, given[name], message) for name in lost])
    return False


def trainer_bench(
    trainer: TrainerConfig,
    given: Mapping[str, str | bool],
    *,
    batch_size: int = 2,
    seed: int = 0,
    is_sft: bool = False,
    prefix: str = "",
) -> TrainerBench:
    """Return the trainer's bench for the config and the given flags; nothing is run.

    `batch_size` and `seed` hold where no flag says otherwise. `is_sft` measures the loss of a fine-tuning. `prefix`
    comes before the flags of the fake samples. Raises InvalidSpecError with everything that is wrong.
    """
    wrong: list[Violation] = []
    fake = f"{prefix}data.fake."

    def number(name: str, default: int, least: int = 1) -> int:
        return _number(given, name, default, least, wrong)

    kind = str(given.get(f"{fake}type", "fixed"))
    if kind not in ("fixed", "variable"):
        wrong.append(_violation(f"{fake}type", kind, "must be fixed or variable"))
    seq_len = number(f"{fake}seq-len", trainer.model.seq_len, 2)
    samples, rows = number(f"{fake}batch-size", batch_size), number(f"{fake}micro-batch-size", 0)
    steps = number("bench.steps", DEFAULT_STEPS)
    if wrong:
        raise InvalidSpecError(wrong)
    model = trainer.model.model_copy(update={"seq_len": seq_len})
    tokens = rows * seq_len if rows else max(trainer.micro_batch_tokens, seq_len)
    changed = trainer.model_copy(update={"model": model, "micro_batch_tokens": tokens, "ckpt": None})
    data = FakeDataConfig.model_validate({"type": kind, "batch_size": samples, "seq_len": seq_len})
    return TrainerBench(trainer=changed, data=data, steps=steps, seed=seed, is_sft=is_sft)


def inference_bench(config: InferenceConfig, given: Mapping[str, str | bool]) -> InferenceBench:
    """Return what the embedded engine's bench measures, for the config and the given flags; nothing is run.

    Raises CliError for vLLM, which has its own benchmark, and InvalidSpecError if the number of steps is malformed.
    """
    if config.needs_vllm or config.engine == "vllm":
        raise CliError(
            "--bench is for the embedded engine; vLLM measures itself",
            hint=f"run it where vLLM is installed: vllm bench throughput --model {config.model.name}",
        )
    return InferenceBench(model=config.model.name, max_num_seqs=config.max_num_seqs, steps=num_steps(given))


def num_steps(given: Mapping[str, str | bool]) -> int:
    """Return how many steps to measure, by the given flags.

    Raise InvalidSpecError if it is not a positive whole number.
    """
    wrong: list[Violation] = []
    steps = _number(given, "bench.steps", DEFAULT_STEPS, 1, wrong)
    if wrong:
        raise InvalidSpecError(wrong)
    return steps


async def run_bench(
    bench: Bench,
    interrupts: Interrupts,
    *,
    output_dir: str,
    num_ranks: int = 1,
    wandb: WandbConfig | None = None,
) -> int:
    """Run the bench in child processes, and return the exit code.

    The results are written into a new directory below `output_dir`, and to W&B if `wandb` is set.
    """
    # Here, because commands of a client alone read the flags above, without the packages that processes take.
    from millrace.cli.session.fine_tune import exporting, gang_environ, rank_spec, wait_for_ranks
    from millrace.processes.supervisor import Supervisor

    directory = Path(output_dir) / f"bench-{secrets.token_hex(3)}"
    directory.mkdir(parents=True)
    path = directory / "config.json"
    path.write_text(bench.model_dump_json(indent=2))
    gang = {} if num_ranks == 1 else gang_environ(num_ranks)
    argv = [sys.executable, *_WORKERS[type(bench)], str(path)]
    shown = bench.model_dump(mode="json") | {"wandb": wandb and wandb.model_dump(mode="json")}
    async with Supervisor() as supervisor:
        interrupts.on_second(supervisor.skip_grace.set)
        ranks = [
            await supervisor.start(rank_spec(rank, argv=argv, gang=gang, logs=directory)) for rank in range(num_ranks)
        ]
        async with exporting(shown, directory):
            code = await wait_for_ranks(ranks)
    if code == 0:
        click.echo(f"{directory / 'bench.json'}", err=True)
    # As shells have it: 128 and the number of the signal.
    return code if code >= 0 else 128 - code


def _number(given: Mapping[str, str | bool], name: str, default: int, least: int, wrong: list[Violation]) -> int:
    """Return the value of the flag `name` as a whole number, or `default` if the flag is not given.

    A value that is no whole number, or is below `least`, is added to `wrong` as a violation, and `default` is returned.
    """
    text = given.get(name)
    if text is None:
        return default
    # `isdigit` alone accepts superscripts, too, which `int` refuses.
    if isinstance(text, str) and text.isascii() and text.isdigit() and int(text) >= least:
        return int(text)
    wrong.append(_violation(name, text, f"must be a whole number from {least} on"))
    return default


def _violation(name: str, value: Any, message: str) -> Violation:
    return Violation(field=f"--{name}", value=str(value), message=message, source="command line")
