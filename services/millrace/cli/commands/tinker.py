"""`millrace tinker`: a server for the public Tinker SDK."""

from pathlib import Path

import click


@click.command()
@click.option("--model", required=True, type=click.Path(path_type=Path), metavar="DIR",
              help="Directory of the base model, on which every model is an adapter.")  # fmt: skip
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name of the base that clients ask for, such as Qwen/Qwen3-8B; repeatable. Default: DIR.",
)
@click.option(
    "--listen",
    default="127.0.0.1:8090",
    show_default=True,
    metavar="HOST:PORT",
    help="Address; port 0 takes a free one.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest sequence. Default: the model's.")
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of trainer and sampler, each."
)
def tinker(model: Path, names: tuple[str, ...], listen: str, max_tokens: int | None, threads: int) -> None:
    """Serve the public Tinker SDK until Ctrl-C. It trains and samples adapters, on CPUs.

    What is asked is stored in MILLRACE_STORE_URL before it is answered, and survives the death of any process.
    """
    import asyncio
    import os

    from millrace.processes.lifeline import run_service
    from millrace.tinker.serve import ServiceOptions, serve

    options = ServiceOptions(model=model, names=names, listen=listen, max_tokens=max_tokens, num_threads=threads)
    run_service(lambda: asyncio.run(serve(options, os.environ, on_start=lambda url: click.echo(f"Serving at {url}"))))
