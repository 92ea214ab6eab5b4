"""What a config was taken to mean where that is not what its words say here: printed once, by the command."""

from dataclasses import dataclass
from enum import Enum

from millrace.config.tree import Path, dotted


class Effect(Enum):
    """What became of a key."""

    MEANS = "means"
    """It has its effect, here or under another key."""
    SAME = "same"
    """It says what is so anyway."""
    NOTHING = "nothing"
    """There is nothing to choose here: the run is the same without it."""
    LATER = "later"
    """A feature that is not there yet; the run learns the same without it."""
    BLOCKS = "blocks"
    """A feature that is not there yet, and without which the run would learn something else: it is not started."""
    REFUSED = "refused"
    """An error; the text says what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What became of one key that was written somewhere."""

    path: Path
    source: str
    effect: Effect
    text: str
    inner: tuple[str, ...] = ()
    """Keys below ``path`` that it speaks for."""

    @property
    def where(self) -> str:
        """`slurm (rl.toml:12; job_name, partition)`."""
        return f"{dotted(self.path)} ({'; '.join((self.source, *filter(None, [', '.join(self.inner)])))})"

    def __str__(self) -> str:
        """`trainer.model.ac (rl.toml:12): …`."""
        return f"{self.where}: {self.text}" if self.text else self.where
