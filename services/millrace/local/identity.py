"""The id of a stack, which every process of it bears: who supervises it, and whose directory it works in.

It stands in the environment of foreign code as well, so it names the directory by a digest only.
"""

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from millrace.processes import table


@dataclass(frozen=True, slots=True, kw_only=True)
class StackId:
    """As text: `{pid}-{start ticks}-{digest of the directory}-{random}`."""

    supervisor: int
    """Process id."""
    start_ticks: int
    """When the supervisor started: another process may get its number later."""
    place: str
    """Digest of the directory's absolute path."""
    random: str

    @classmethod
    def new(cls, directory: Path) -> Self:
        """The id of a stack that this process supervises."""
        ticks = table.start_ticks(os.getpid())
        return cls(supervisor=os.getpid(), start_ticks=ticks, place=place_of(directory), random=secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None for what is no such id."""
        match text.split("-"):
            case [pid, ticks, place, random] if pid.isdecimal() and ticks.isdecimal():
                return cls(supervisor=int(pid), start_ticks=int(ticks), place=place, random=random)
        return None

    def __str__(self) -> str:
        return f"{self.supervisor}-{self.start_ticks}-{self.place}-{self.random}"

    @property
    def is_supervised(self) -> bool:
        """Whether its supervisor lives."""
        return table.is_running(self.supervisor) and table.start_ticks(self.supervisor) == self.start_ticks


def place_of(directory: Path) -> str:
    """What ids say of a directory."""
    return hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]
