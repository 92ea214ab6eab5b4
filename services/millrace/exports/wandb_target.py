"""Where in W&B a run goes, as its own config says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_PROJECT = "millrace"


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbTarget:
    """Where in W&B the run is, and what of it goes there."""

    project: str
    id: str
    name: str
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    is_offline: bool = False
    directory: Path
    samples: bool = False
    distributions: bool = False
    interval: int = 10
    """Steps between two tables."""
    config: Mapping[str, Any] = field(default_factory=dict)


def target_of(config: Mapping[str, Any], *, uid: str, run: str, directory: Path) -> WandbTarget:
    """The target of a run by its resolved config; its defaults where that has no `[wandb]`."""
    wandb = config.get("wandb") or {}
    extras = wandb.get("log_extras") or {}
    interval = extras.get("interval")
    return WandbTarget(
        project=wandb.get("project") or DEFAULT_PROJECT,
        id=wandb.get("id") or uid,
        name=wandb.get("name") or run,
        entity=wandb.get("entity"),
        group=wandb.get("group"),
        tags=tuple(wandb.get("tags") or ()),
        is_offline=bool(wandb.get("offline")),
        directory=directory,
        samples=bool(extras.get("samples")),
        distributions=bool(extras.get("distributions")),
        interval=10 if interval is None else interval,
        config=config,
    )
