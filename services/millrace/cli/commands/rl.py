"""`millrace rl`: one RL run from a config to a summary."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from millrace.cli.options import OPTIONS_HELP, RawCommand

if TYPE_CHECKING:
    from millrace.cli.session.prepare import Prepared


_BENCH_HELP = """
  --bench         Measure the trainer on fake samples (--trainer.data.fake.KEY), the embedded engine on random prompts,
                  and orchestrator, environments and engine without learning, and train nothing; --bench.steps N."""


@click.command(cls=RawCommand, epilog=OPTIONS_HELP + _BENCH_HELP)
def rl(arguments: tuple[str, ...]) -> int:
    """Train with reinforcement learning.

    Starts the local stack for the run and tears it down afterwards; with --server or MILLRACE_SERVER it submits the
    run there and follows it (Ctrl-C detaches, and the run continues).
    """
    from millrace.cli.session.prepare import prepare, print_config, validate_models

    prepared = prepare(arguments)
    if prepared.flags.get("bench") and not prepared.is_dry_run:
        return _bench(prepared)
    if prepared.is_checked:
        from millrace.cli import interrupts
        from millrace.cli.session.environment_check import check_environments

        interrupts.run(lambda signals: check_environments(prepared, server=prepared.server))
    if prepared.is_dry_run:
        validate_models(prepared.config)
        if prepared.server is None:
            _require_environments(prepared)
        print_config(prepared.config, only=prepared.shown)
        return 0
    from millrace.cli import interrupts
    from millrace.cli.connection import explain_unreachable
    from millrace.cli.session.results import summary_lines
    from millrace.cli.session.run_session import run_local, run_remote

    flow = run_local if prepared.server is None else run_remote
    explained = explain_unreachable(prepared.server_origin, prepared.server) if prepared.server else nullcontext()
    with explained:
        data, path = interrupts.run(lambda signals: flow(prepared, signals))
    click.echo("\n".join(["", *summary_lines(data), str(path)]))
    return 0


def _require_environments(prepared: "Prepared") -> None:
    """Raise InvalidSpecError if this machine lacks an environment of the run."""
    from millrace.cli.session.environment_check import require_installed

    loop = prepared.config.orchestrator
    require_installed(loop.env, "orchestrator.env")
    require_installed(loop.eval.env if loop.eval else (), "orchestrator.eval.env")


def _bench(prepared: "Prepared") -> int:
    """Run the benches one after the other: the trainer, the engine (if it is embedded), the orchestrator with both.

    Return the exit code; the first failure ends the sequence.
    """
    from millrace.cli import interrupts
    from millrace.cli.session.bench import Bench, inference_bench, run_bench, trainer_bench
    from millrace.cli.session.orchestrator_bench import bench_orchestrator

    config, flags = prepared.config, prepared.flags
    batch_size = config.orchestrator.batch_size
    alone: list[Bench] = [
        trainer_bench(config.trainer, flags, batch_size=batch_size, seed=config.seed, prefix="trainer.")
    ]
    if config.inference.engine != "vllm":
        alone.append(inference_bench(config.inference, flags))
    for bench in alone:
        code = interrupts.run(
            lambda signals, bench=bench: run_bench(bench, signals, output_dir=config.output_dir, wandb=config.wandb)
        )
        if code:
            return code
    return interrupts.run(lambda signals: bench_orchestrator(prepared, signals))
