"""`millrace run export-policy`: the policy of a step as a directory that other programs load."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from millrace.cli.errors import CliError

if TYPE_CHECKING:
    from millrace.policies.manifest import PolicyManifest
    from millrace.runlog.names import Names
    from millrace.storage import ObjectStore


@click.command("export-policy")
@click.argument("name", metavar="RUN")
@click.option(
    "--step", type=int, default=-1, help="The policy after so many steps (0: the start model); -1: the newest."
)
@click.option("--to", "directory", type=click.Path(path_type=Path), required=True, help="Directory, new or empty.")
@click.option(
    "--merged/--adapter", "is_merged", default=True, help="Of a LoRA run: a whole model, or the adapter alone."
)
@click.option("--store", metavar="URL", help="Its object store; else MILLRACE_STORE_URL, else outputs/local/store.")
@click.option("--prefix", metavar="NAME", help="Deployment of the run; else MILLRACE_PREFIX, else millrace.")
def export_policy(name: str, step: int, directory: Path, is_merged: bool, store: str | None, prefix: str | None) -> int:
    """Write the policy of a step in Hugging Face format.

    `AutoModelForCausalLM.from_pretrained` and vLLM load it; with --adapter, PEFT and vLLM do, on top of the base. Every
    byte is proved by its digest. Reads the object store only, while the run goes on, too.
    """
    from millrace.cli.offline.run_store import find_uid, open_run_store, store_prefix
    from millrace.policies.pull import download_hf, download_merged
    from millrace.runlog.names import Names

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CliError(f"{directory} exists and is not an empty directory", hint="name a new directory with --to")
    objects, deployment = open_run_store(store), store_prefix(prefix)
    names = Names(deployment, find_uid(objects, deployment, name))
    manifest = _find(objects, names, step, run=name)
    if not is_merged and manifest.adapter is None:
        raise CliError(
            f"version {manifest.version} of {name} has no adapter: all weights are trained, or it is the start model",
            hint="leave --adapter out",
        )
    written = (download_merged if is_merged else download_hf)(objects, manifest, directory)
    merged = " (adapter merged into its base)" if is_merged and manifest.adapter is not None else ""
    click.echo(f"version {manifest.version}{merged}, digest {manifest.digest}\n{written.resolve()}")
    return 0


def _find(store: "ObjectStore", names: "Names", step: int, *, run: str) -> "PolicyManifest":
    """The manifest of a version, of its newest lineage; CliError naming what there is."""
    from millrace.policies.pull import read_manifest
    from millrace.runlog.records.listing import list_policies
    from millrace.storage.commit_points import find_newest

    published = reversed(list_policies(store, names))
    versions: list[int] = []
    for version, lineage in published:
        key = find_newest(store, names.policy_manifest(lineage, version))
        if key is not None and (step in (-1, version)):
            return read_manifest(store, key)
        versions += [version] if key is not None else []
    span = f"versions {versions[-1]} to {versions[0]}" if versions else "no version"
    raise CliError(
        f"{run} has no policy after step {step}: it has published {span}", hint="choose one of them with --step"
    )
