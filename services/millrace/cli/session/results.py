"""The results of a run on this machine: the policy, the plot, and `summary.json`."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from millrace.cli.view.progress import Progress, TransferredBytes, write_plot
from millrace.cli.view.text import duration, size
from millrace.runlog.run_status import Staleness, state_name, version_names
from millrace.v1 import run_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """Where the results of a run are; None for what does not exist."""

    policy_path: str | None
    """A directory in Hugging Face format, or the manifest's URI if this machine cannot read the store."""
    checkpoint_path: str | None
    plot_path: str | None


def split_uri(uri: str, uid: str) -> tuple[str, str]:
    """Split an object's URI into the store's URL and the object's key.

    Raises ValueError if it is not an object of run `uid`.
    """
    parts = urlsplit(uri)
    path = unquote(parts.path)
    # The key begins with the prefix, which holds no slash, before `runs/{uid}/`.
    match = re.search(rf"/([^/]+/runs/{re.escape(uid)}/.+)$", path)
    if match is None:
        raise ValueError(f"{uri} is no object of run {uid}")
    root = path[: match.start(1)].rstrip("/") or "/"
    return (Path(root).as_uri() if parts.scheme == "file" else f"{parts.scheme}://{parts.netloc}{root}"), match.group(1)


def local_path(uri: str) -> Path | None:
    """Return the path of a `file://` URI if it exists here; otherwise None."""
    parts = urlsplit(uri)
    path = Path(unquote(parts.path))
    return path if parts.scheme == "file" and path.exists() else None


def download_policy(progress: Progress, directory: Path, *, store_url: str | None) -> str | None:
    """Download the newest policy into `directory` in Hugging Face format, and return its path.

    None if nothing is published. `store_url` is the store as this machine reaches it, with endpoint and region. Without
    it, only a store in a local directory can be read. The manifest's URI is returned if the store is not reachable, or
    if packages for it are missing (`millrace[client]` has neither numpy nor boto3).
    """
    if progress.policy is None or not progress.policy.uri:
        return None
    url, key = split_uri(progress.policy.uri, progress.uid)
    if store_url is None and local_path(progress.policy.uri) is None:
        return progress.policy.uri
    try:
        from millrace.policies.host_copy import download_hf, read_manifest
        from millrace.storage import open_store
    except ImportError:
        return progress.policy.uri
    store = open_store(store_url or url)
    return str(download_hf(store, read_manifest(store, key), directory).resolve())


def checkpoint_path(progress: Progress) -> str | None:
    """Return the directory of the last checkpoint, or its URI if it is not on this machine; None if there is none."""
    if progress.checkpoint is None:
        return None
    manifest = local_path(progress.checkpoint.uri)
    if manifest is None:
        return progress.checkpoint.uri
    return str(manifest if manifest.is_dir() else manifest.parent)


def collect(progress: Progress, directory: Path, *, store_url: str | None) -> Artifacts:
    """Download the newest policy and draw the plot into `directory`; return where the results are.

    `store_url` is the object store as this machine reaches it; None for one in a local directory.
    """
    policy = download_policy(progress, directory / "policy", store_url=store_url)
    plot = directory / "reward.png"
    return Artifacts(
        policy_path=policy,
        checkpoint_path=checkpoint_path(progress),
        plot_path=str(plot.resolve()) if write_plot(progress, plot) else None,
    )


def summary(progress: Progress, artifacts: Artifacts, *, seconds: float, phases: dict[str, float]) -> dict[str, Any]:
    """Return the summary of a run as plain data: rewards, steps, times, where results are, and what happened.

    Programs may rely on the first nine keys. `seconds` is the time that the command took, `phases` that of its parts,
    in seconds by name. Paths are None where `artifacts` has none.
    """
    last = {point.env: point for point in progress.evals}
    return {
        "reward_before": progress.reward_before,
        "reward_after": progress.reward_after,
        "steps": progress.step,
        "seconds": round(seconds, 3),
        "trainer_wait_ratio": progress.wait_ratio,
        "mismatch_kl": progress.score.mismatch_kl if progress.score is not None else None,
        "policy_path": artifacts.policy_path,
        "checkpoint_path": artifacts.checkpoint_path,
        "plot_path": artifacts.plot_path,
        "name": progress.name,
        "uid": progress.uid,
        "state": state_name(progress.state),
        "policy_version": progress.policy.version if progress.policy is not None else None,
        "weights": {"published": _moved(progress.published), "fetched": _moved(progress.fetched)},
        "max_abs_logprob_diff": progress.score.max_abs_logprob_diff if progress.score is not None else None,
        "num_rollouts": sum(point.num_rollouts for point in progress.steps),
        "num_tokens": sum(point.num_tokens for point in progress.steps),
        "staleness_max": max((point.staleness_max for point in progress.steps), default=None),
        "staleness": {env: _staleness(each) for env, each in sorted(progress.staleness.items())},
        "dropped": dict(sorted(progress.dropped.items())),
        "failed_rollouts": {
            env: dict(sorted(each.failed.items())) for env, each in sorted(progress.environments.items())
        },
        "evals": [
            {
                "env": p.env,
                "step": p.step,
                "policy_version": p.version,
                "policy_version_max": p.version_max,
                "reward": p.reward,
                "num_rollouts": p.num_rollouts,
                "num_failed": p.num_failed,
                "skipped": list(p.skipped),
            }
            for p in progress.evals
        ],
        "eval_num_failed": sum(point.num_failed for point in last.values()),
        "phases": {name: round(value, 3) for name, value in phases.items()},
    }


def _staleness(found: Staleness) -> dict[str, Any]:
    """Return the staleness of one environment's rollouts as plain data, and in words."""
    return {**asdict(found), "words": found.words}


def _moved(moved: TransferredBytes) -> dict[str, Any]:
    """Return the transferred bytes and the size of full copies of the same versions.

    `ratio` is None if it is unknown.
    """
    return {
        "versions": moved.versions,
        "bytes": moved.moved_bytes,
        "full_bytes": moved.full_bytes,
        "ratio": None if moved.ratio is None else round(moved.ratio, 4),
    }


def phases_of(progress: Progress) -> dict[str, float]:
    """Return the seconds of the phases `start_s`, `train_s` and `finish_s`, from the times of the run's state changes.

    A phase whose beginning or end is not known is left out.
    """
    marks = [
        ("start_s", run_pb2.RUN_STATE_STARTING, run_pb2.RUN_STATE_RUNNING),
        ("train_s", run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_STOPPING),
        ("finish_s", run_pb2.RUN_STATE_STOPPING, run_pb2.RUN_STATE_SUCCEEDED),
    ]
    at = progress.entered
    return {name: at[end] - at[begin] for name, begin, end in marks if begin in at and end in at}


def watched_summary(progress: Progress) -> dict[str, Any]:
    """Return the summary of a run that was only followed: nothing was downloaded."""
    artifacts = Artifacts(
        policy_path=progress.policy.uri if progress.policy is not None else None,
        checkpoint_path=checkpoint_path(progress),
        plot_path=None,
    )
    phases = phases_of(progress)
    return summary(progress, artifacts, seconds=sum(phases.values()), phases=phases)


def write_summary(data: dict[str, Any], path: Path) -> None:
    """Write the summary as JSON to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")


def _moved_line(weights: dict[str, Any]) -> str:
    """Return a line such as `published 12 MB (31% of full copies), fetched 9 MB (28%)`; empty if nothing was moved."""
    parts = [
        f"{what} {size(weights[what]['bytes'])}"
        + ("" if weights[what]["ratio"] is None else f" ({weights[what]['ratio']:.1%} of full copies)")
        for what in ("published", "fetched")
        if weights[what]["versions"]
    ]
    return ", ".join(parts)


def _skipped_line(evals: Sequence[dict[str, Any]]) -> str:
    """Return a line such as `letters: v20, v40; words: v20`: the versions whose evaluation was due and was skipped.

    Environments without a skipped evaluation are left out; empty if there is none.
    """
    found: dict[str, list[int]] = {}
    for each in evals:
        if each["skipped"]:
            found.setdefault(each["env"], []).extend(each["skipped"])
    return "; ".join(f"{env}: {version_names(versions)}" for env, versions in found.items())


def summary_lines(data: dict[str, Any], *, with_plot: bool = True) -> list[str]:
    """Return the summary as lines for the terminal, without values that do not exist. A watched run has no plot."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    before, after = data["reward_before"], data["reward_after"]
    rewards = [number(before, ".3f"), number(after, ".3f")] if before is not None or after is not None else []
    gain = f"  ({after - before:+.3f})" if before is not None and after is not None else ""
    stale = {env: each for env, each in data["staleness"].items() if each["words"]}
    rows = [
        ("run", f"{data['name'].removeprefix('runs/')}  {data['state']}"),
        ("held-out reward", " → ".join(reward or "–" for reward in rewards) + gain),
        ("steps", f"{data['steps']} in {duration(data['seconds'])}"),
        *(("staleness" if n == 0 else "", f"{env}: {each['words']}") for n, (env, each) in enumerate(stale.items())),
        ("trainer waited", number(data["trainer_wait_ratio"], ".0%")),
        ("not evaluated", _skipped_line(data["evals"])),
        ("mismatch kl", number(data["mismatch_kl"], ".1e")),
        ("weights moved", _moved_line(data["weights"])),
        ("policy", data["policy_path"] or ""),
        ("checkpoint", data["checkpoint_path"] or ""),
        ("plot", data["plot_path"] or "– (needs matplotlib: install millrace[local])") if with_plot else ("", ""),
    ]
    return [f"{label:<16} {value}" for label, value in rows if value]
