"""`millrace sft`: supervised fine-tuning on this machine, in one trainer process or in one per GPU."""

import click

from millrace.cli.options import RawCommand

_HELP = """\b
Options:
  --KEY VALUE     Any key of the config, such as --optim.lr 1e-3.
  --nproc-per-node N
                  Train with N processes on this machine; one per GPU if left out, or 1 where there are none.
  --bench         Take steps on fake samples instead, in isolation, and print tokens/s, MFU, peak memory, time by phase;
                  --bench.steps N of them. --data.fake.type fixed|variable says how long they are.
  --name NAME     Name of the run, as `run.name`; made up if left out.
  --dry-run       Look at a local model and at the first rows of local data, print the resolved config, and do nothing.
  --debug         Show tracebacks."""

_NUM_RANKS = "nproc-per-node"
_FLAGS = {
    "name": True,
    _NUM_RANKS: True,
    "dry-run": False,
    "check-environments": False,  # refused, with a message that names its commands
    "plain": False,
    "debug": False,
    "help": False,
}


@click.command(cls=RawCommand, epilog=_HELP)
def sft(arguments: tuple[str, ...]) -> int:
    """Fine-tune a model on this machine. Ctrl-C stops it."""
    from millrace.cli.session.bench import flags, is_bench, run_bench, trainer_bench
    from millrace.cli.session.config_file import (
        explained,
        print_notes,
        refuse_blocked,
        refuse_check,
        require_file_or_model,
    )
    from millrace.cli.session.prepare import check_models, check_new_name, print_config, validate_fine_tuning
    from millrace.config import SFTConfig
    from millrace.config.load import load

    example = "millrace sft @ examples/reverse_text/sft.toml"
    with explained(arguments, command="sft", example=example):
        loaded = load(SFTConfig, arguments, reserved={**_FLAGS, **flags()})
    asked = loaded.flags.get(_NUM_RANKS)
    num_ranks = _num_ranks(asked or _one_per_gpu())
    refuse_check(loaded)
    config = loaded.config
    if name := loaded.flags.get("name"):
        check_new_name(str(name), option="--name")
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    print_notes(loaded.notes)
    benches = is_bench(loaded.flags)
    if loaded.flags.get("dry-run"):
        from millrace.cli.session.environment_check import require_installed

        validate_fine_tuning(config)
        require_installed(config.eval.env if config.eval else (), "eval.env")
        print_config(config)
        return 0
    refuse_blocked(loaded.notes)
    require_file_or_model(loaded, example=example)
    names = {"model.name": config.model.name}
    check_models(names, sources=loaded.sources, output_dir=config.output_dir, sft_hint=False)

    from millrace.cli import interrupts
    from millrace.cli.session.fine_tune import fine_tune

    if benches:
        num_samples = config.data.batch_size * (1 if config.dpo is None else 2)
        bench = trainer_bench(config.as_trainer(), loaded.flags, batch_size=num_samples, seed=config.seed, is_sft=True)
        return interrupts.run(
            lambda signals: run_bench(
                bench, signals, output_dir=config.output_dir, num_ranks=num_ranks, wandb=config.wandb
            )
        )

    if config.eval is None:
        return interrupts.run(lambda signals: fine_tune(config, signals, num_ranks=num_ranks))
    from functools import partial

    from millrace.cli.evals.beside import engine_beside, evaluating
    from millrace.cli.session.environment_check import check_evaluated, keep_logs_off_the_terminal

    engine, gpus = engine_beside(config)
    # One for each GPU that the engine of the evaluations leaves.
    num_ranks = num_ranks if asked else max(1, len(gpus or ()))
    envs = config.eval.env
    keep_logs_off_the_terminal()
    # Before the training: an environment that cannot be loaded would fail every evaluation.
    interrupts.run(lambda _: check_evaluated(envs))
    beside = partial(evaluating, engine=engine)
    return interrupts.run(lambda signals: fine_tune(config, signals, num_ranks=num_ranks, gpus=gpus, evaluating=beside))


def _one_per_gpu() -> str:
    """Return as text how many processes train if `--nproc-per-node` is not given: one per GPU, at least 1."""
    from millrace.local.gpus import training_gpus

    return str(max(1, len(training_gpus())))


def _num_ranks(text: str | bool) -> int:
    """Return the value of `--nproc-per-node` as a number.

    Raise InvalidSpecError if it is not a positive whole number.
    """
    from millrace.errors import InvalidSpecError, Violation

    if isinstance(text, str) and text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    problem = Violation(
        field=f"--{_NUM_RANKS}",
        value=str(text),
        message="must be a number of processes, 1 or more",
        source="command line",
    )
    raise InvalidSpecError([problem])
