"""The estimate of a run: memory by kind, whether it fits, what makes it fit, and how fast it goes at a utilization."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS: tuple[str, ...] = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
"""The uses of memory. Buffers: the model's, and those that parameters and gradients are gathered and summed in."""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A change of the run, as keys of its config, and the peak in bytes that it leads to."""

    keys: tuple[str, ...]
    peak: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What rank 0, whose share is the largest, holds at the peak of a step, in bytes.

    `limit` is the device's memory less the reserve; `tokens_per_s` is over all devices, of samples of `seq_len` tokens.
    """

    model: str
    num_parameters: int
    num_trained: int
    num_gpus: int
    rows: int
    seq_len: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    limit: int
    reserve: int
    flops_per_token: float
    mfu: float
    tokens_per_s: float | None
    trials: Sequence[Trial] = ()

    @property
    def peak(self) -> int:
        """Return the bytes of all kinds in the device's memory at the peak of a step."""
        return sum(self.device.values())

    @property
    def fits(self) -> bool:
        """Return whether the peak is within the limit."""
        return self.peak <= self.limit

    @property
    def remedy(self) -> Trial | None:
        """Return the first tried change of the config that makes the run fit; None if there is none."""
        return next((trial for trial in self.trials if trial.fits), None)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as plain data."""
        return {
            "model": self.model,
            "parameters": self.num_parameters,
            "trained_parameters": self.num_trained,
            "gpus": self.num_gpus,
            "micro_batch": {"rows": self.rows, "tokens_per_row": self.seq_len},
            "bytes_per_rank": dict(self.device) | {"peak": self.peak},
            "host_bytes_per_rank": dict(self.host),
            "limit_bytes": self.limit,
            "reserve_bytes": self.reserve,
            "fits": self.fits,
            "trials": [{"keys": list(each.keys), "peak": each.peak, "fits": each.fits} for each in self.trials],
            "remedy": None if self.remedy is None else list(self.remedy.keys),
            "flops_per_token": self.flops_per_token,
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
        }

    def lines(self) -> list[str]:
        """Return the estimate as lines of text for people."""
        devices = f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}" if self.num_gpus else "one process on a CPU"
        rows = [f"{kind:<12} {_gib(self.device.get(kind, 0)):>9}{_beside(self.host.get(kind, 0))}" for kind in KINDS]
        return [
            f"{self.model}: {self.num_parameters / 1e9:.2f} B parameters, {_share(self.num_trained)} trained, on "
            f"{devices}, micro-batches of {self.rows} × {self.seq_len} tokens",
            "",
            "per rank, at the peak of a step",
            *rows,
            f"{'peak':<12} {_gib(self.peak):>9}",
            "",
            *self._verdict(),
            "",
            self._speed(),
        ]

    def _verdict(self) -> list[str]:
        """Return lines that say whether the run fits and, if not, what was tried and what helps."""
        of = f"{_gib(self.limit).strip()} ({_gib(self.reserve).strip()} left for the runtime)"
        if self.fits:
            return [f"fits into {of}, with {_gib(self.limit - self.peak).strip()} to spare"]
        tried = [f"  {' and '.join(each.keys)}: {_gib(each.peak).strip()}" for each in self.trials]
        found = self.remedy
        advice = f"fits with {' and '.join(found.keys)}" if found else "no key that was tried makes it fit"
        return [f"does not fit into {of}; tried:", *tried, advice]

    def _speed(self) -> str:
        """Return a line with the operations per token and, if the peak is known, the tokens per second."""
        need = f"{self.flops_per_token / 1e9:.1f} GFLOP per token at {self.seq_len} tokens"
        if self.tokens_per_s is None:
            return f"{need}; --gpu-tflops gives tokens/s"
        return f"{need}: {self.tokens_per_s:,.0f} tokens/s in all at an MFU of {self.mfu:.0%}"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _beside(size: int) -> str:
    return f"  and {_gib(size)} in host memory" if size else ""


def _share(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
