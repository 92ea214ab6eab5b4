"""`millrace inference`: one inference replica in the foreground."""

import click

from millrace.cli.options import RawCommand

_HELP = """\b
Options:
  --KEY VALUE     Any key of the section, such as --model.name DIR or --parallel.tp 4 (docs/configuration.md).
  --FLAG [VALUE]  Any flag of `vllm serve`, such as --tensor-parallel-size 4 or --headless.
  --bench         Generate from random prompts instead, with the embedded engine alone, and print tokens/s and memory;
                  --bench.steps N says how often.
  --dry-run       Print the resolved config and do nothing.
  --debug         Show tracebacks.

\b
Where it belongs is in the environment: MILLRACE_ORCHESTRATOR and MILLRACE_STORE_URL (it serves the policies of runs),
MILLRACE_LISTEN (its gRPC server; a free port by default), MILLRACE_VLLM_PYTHON (the interpreter that has vLLM)."""


@click.command(cls=RawCommand, epilog=_HELP)
def inference(arguments: tuple[str, ...]) -> int:
    """Run one inference replica until Ctrl-C.

    It registers with the orchestrator and serves the policy of its run; the model comes with the policy, or is the
    one that the config names. Without an orchestrator it serves that model as an OpenAI-compatible server.
    """
    from millrace.cli.session.bench import inference_bench, is_bench, run_bench
    from millrace.cli.session.config_file import print_notes, refuse_flags_of_runs
    from millrace.cli.session.service_start import load_replica, start_replica

    loaded = load_replica(arguments)
    refuse_flags_of_runs(loaded, command="inference")
    print_notes(loaded.notes)
    if loaded.flags.get("dry-run"):
        import json

        click.echo(json.dumps(loaded.config.model_dump(mode="json"), indent=2))
        return 0
    if is_bench(loaded.flags):
        from millrace.cli import interrupts

        bench = inference_bench(loaded.config.inference, loaded.flags)
        return interrupts.run(lambda signals: run_bench(bench, signals, output_dir="outputs"))
    start_replica(loaded)
    return 0
