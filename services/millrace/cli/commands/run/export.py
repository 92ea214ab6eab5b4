"""`millrace run export`: metrics and samples for other tools; `export-policy`: a policy in Hugging Face format."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.errors import CliError
from millrace.cli.options import RUN, STORE

if TYPE_CHECKING:
    from millrace.policies.manifest import PolicyManifest
    from millrace.readers.exports.wandb_run import WandbTarget
    from millrace.runlog.names import Names
    from millrace.storage import ObjectStore


_FORMS = ("jsonl", "parquet", "tensorboard", "wandb")


@click.command("export-policy")
@RUN
@click.option(
    "--step", type=int, default=-1, help="The policy after so many steps (0: the start model); -1: the newest."
)
@click.option("--to", "directory", type=click.Path(path_type=Path), required=True, help="Directory, new or empty.")
@click.option(
    "--merged/--adapter", "is_merged", default=True, help="Of a LoRA run: a whole model, or the adapter alone."
)
@STORE
def export_policy(name: str, step: int, directory: Path, is_merged: bool, store: str | None, prefix: str | None) -> int:
    """Write the policy of a step in Hugging Face format.

    `AutoModelForCausalLM.from_pretrained` and vLLM load it; with --adapter, PEFT and vLLM do, on top of the base. Every
    byte is proved by its digest. Reads the object store only, while the run goes on, too.
    """
    from millrace.cli.offline.run_store import open_run
    from millrace.cli.view.live import shown_work
    from millrace.policies.host_copy import download_hf, download_merged
    from millrace.runlog.names import Names
    from millrace.telemetry import progress
    from millrace.telemetry.progress import Activity

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CliError(f"{directory} exists and is not an empty directory", hint="name a new directory with --to")
    objects, deployment, uid = open_run(name, store, prefix)
    names = Names(deployment, uid)
    manifest = _find(objects, names, step, run=name)
    if not is_merged and manifest.adapter is None:
        raise CliError(
            f"version {manifest.version} of {name} has no adapter: all weights are trained, or it is the start model",
            hint="leave --adapter out",
        )
    loading = progress.work(Activity.DOWNLOAD, f"version {manifest.version} of {name}", waits_on="object store")
    with shown_work(), loading:
        written = (download_merged if is_merged else download_hf)(objects, manifest, directory)
    merged = " (adapter merged into its base)" if is_merged and manifest.adapter is not None else ""
    click.echo(f"version {manifest.version}{merged}, digest {manifest.digest}\n{written.resolve()}")
    return 0


def _find(store: "ObjectStore", names: "Names", step: int, *, run: str) -> "PolicyManifest":
    """Return the manifest of the policy after `step`, from its newest lineage; -1 is the newest policy.

    Raises CliError if there is none.
    """
    from millrace.policies.host_copy import read_manifest
    from millrace.runlog.records.retirement import require_policy
    from millrace.runlog.records.run_record import published_policies

    versions: list[int] = []
    for version, key in published_policies(store, names):
        if step in (-1, version):
            require_policy(store, key)
            return read_manifest(store, key)
        versions.append(version)
    span = f"versions {versions[-1]} to {versions[0]}" if versions else "no version"
    raise CliError(
        f"{run} has no policy after step {step}: it has published {span}", hint="choose one of them with --step"
    )


@click.command("export")
@RUN
@click.option("--to", "form", type=click.Choice(_FORMS), required=True, help="What it is written for.")
@click.option("--samples", "with_samples", is_flag=True, help="Prompts, completions, rewards and advantages, too.")
@click.option(
    "--out", "directory", type=click.Path(path_type=Path, file_okay=False),
    help="Directory that is written into; exports/UID if left out.",
)  # fmt: skip
@click.option("--project", default=None, metavar="NAME", help="With wandb: its project; else that of the run's config.")
@click.option("--entity", default=None, metavar="NAME", help="With wandb: its user or team.")
@click.option("--offline", "is_offline", is_flag=True, help="With wandb: write files only; `wandb sync` uploads them.")
@STORE
def export(
    name: str,
    form: str,
    with_samples: bool,
    directory: Path | None,
    store: str | None,
    prefix: str | None,
    **wandb: Any,
) -> int:
    """Write the metrics of a run for other tools, each once per step.

    RUN is a name, the beginning of one, a uid, - for the most recent run, or the directory that `millrace rl` has
    written. Reads the object store only, also while the run goes on. Secrets in texts are masked. parquet, tensorboard
    and wandb need an extra each, such as millrace[wandb]; W&B's key is read from WANDB_API_KEY.
    """
    from millrace.cli.offline.run_store import open_run, say_retired
    from millrace.readers.exports.files import export_files
    from millrace.readers.exports.metrics import points, read_metrics
    from millrace.readers.exports.samples import read_samples
    from millrace.runlog.names import Names

    objects, deployment, uid = open_run(name, store, prefix)
    names = Names(deployment, uid)
    rows = read_metrics(objects, names)
    if with_samples:
        say_retired(objects, names)
    target = directory or Path("exports") / names.uid
    if form == "wandb":
        from dataclasses import replace

        from millrace.readers.exports.live import open_target

        made = _wandb_target(objects, names, target)
        made = replace(
            made, samples=with_samples or made.samples, **{key: value for key, value in wandb.items() if value}
        )
        run = open_target(made, samples_of=lambda step: list(read_samples(objects, names, step=step)))
        for index, row in enumerate(rows):
            run.write(index, row)
        written = [run.directory]
        run.finish()
    else:
        written = export_files(form, target, rows, read_samples(objects, names) if with_samples else None)
    count = sum(1 for _ in points(rows))
    if not count:
        raise CliError(f"{name} has no metrics yet", hint="events reach the object store within 10 s")
    click.echo("\n".join([f"{count} values of {len(rows)} facts", *(str(path.resolve()) for path in written)]))
    return 0


def _wandb_target(store: "ObjectStore", names: "Names", directory: Path) -> "WandbTarget":
    """Return the W&B settings from the run's config, to be written below `directory`."""
    from millrace.readers.exports.wandb_run import target_of
    from millrace.runlog.records.run_record import RunRecord

    record = RunRecord.parse(store.get(names.run_json), where=store.uri(names.run_json), needs=["name"])
    return target_of(record.config or {}, uid=names.uid, run=record.name, directory=directory)
