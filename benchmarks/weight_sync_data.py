"""Two versions of a bf16 policy for the codec benchmark: synthetic ones of a chosen density, and real AdamW steps."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from report import REPOSITORY, progress
from torch import nn

WARM_UP_STEPS = 30  # past Adam's start, where every step is of full size whatever the gradient
WARM_UP_LR = 3e-4
STEPS_BETWEEN = 3  # at the measured learning rate, before the step that is published
CONTEXT, BATCH = 64, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Two versions of the same tensors as flat bf16 bits, in pairs (base, new)."""

    name: str
    pairs: list[tuple[NDArray[np.uint16], NDArray[np.uint16]]]

    @property
    def num_elements(self) -> int:
        return sum(base.size for base, _ in self.pairs)

    @property
    def num_changed(self) -> int:
        return sum(int(np.count_nonzero(base != new)) for base, new in self.pairs)

    @property
    def single_share(self) -> float:
        """Of the changes, those by one unit in the last place that keep the sign."""
        single = sum(
            int(np.count_nonzero(np.abs(base.astype(np.int32) - new.astype(np.int32)) == 1)) for base, new in self.pairs
        )
        return single / max(1, self.num_changed)


def synthetic(density: float, *, elements: int, seed: int = 0) -> Versions:
    """Gaussian weights of deviation 0.02 and a Gaussian step of the size at which `density` of the elements change."""
    rng = np.random.default_rng(seed)
    master = rng.standard_normal(elements, dtype=np.float32) * np.float32(0.02)
    step = rng.standard_normal(elements, dtype=np.float32)
    step *= step_size(density)
    step += master
    new = nearest_bf16(step)
    return Versions(name=f"synthetic {100 * density:g} %", pairs=[(nearest_bf16(master), new)])


def step_size(density: float) -> np.float32:
    """Deviation of a Gaussian step that changes `density` of Gaussian bf16 weights of deviation 0.02."""
    rng = np.random.default_rng(7)
    master, step = rng.standard_normal((2, 1 << 20), dtype=np.float32)
    master *= np.float32(0.02)
    low, high = np.float32(1e-9), np.float32(1.0)
    for _ in range(40):
        middle = np.sqrt(low * high)
        changed = np.mean(nearest_bf16(master) != nearest_bf16(master + middle * step))
        low, high = (middle, high) if changed < density else (low, middle)
    return low


def nearest_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even; for finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(-2, -3).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class _Transformer(nn.Module):
    """A byte-level language model."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[_Block(width, width // 64) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class AdamSteps:
    """A transformer in fp32 that is trained past Adam's start-up, and publishes bf16 after steps at other rates."""

    def __init__(self, *, width: int, layers: int, warm_up_steps: int = WARM_UP_STEPS) -> None:
        torch.manual_seed(0)
        self._text = torch.frombuffer(bytearray(_text()), dtype=torch.uint8).long()
        self._model = _Transformer(width=width, layers=layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=WARM_UP_LR, weight_decay=0.01)
        for number in range(warm_up_steps):
            loss = self._step()
            if number % 10 == 0:
                progress(f"warm-up step {number}: loss {loss:.3f}")
        self._weights = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._moments = [
            {key: value.clone() for key, value in self._optimizer.state[weight].items()}
            for weight in self._model.parameters()
        ]

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._model.parameters())

    def versions(self, lr: float) -> Versions:
        """The versions before and after one step at `lr`, from the warmed-up state on."""
        self._model.load_state_dict(self._weights)
        for weight, moments in zip(self._model.parameters(), self._moments, strict=True):
            self._optimizer.state[weight] = {key: value.clone() for key, value in moments.items()}
        self._optimizer.param_groups[0]["lr"] = lr
        torch.manual_seed(1)
        for _ in range(STEPS_BETWEEN):
            self._step()
        base = self._published()
        self._step()
        return Versions(name=f"AdamW lr {lr:.0e}", pairs=list(zip(base, self._published(), strict=True)))

    def _step(self) -> float:
        starts = torch.randint(len(self._text) - CONTEXT - 1, (BATCH,))
        rows = torch.stack([self._text[start : start + CONTEXT + 1] for start in starts])
        logits = self._model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()

    def _published(self) -> list[NDArray[np.uint16]]:
        return [
            weight.detach().bfloat16().flatten().view(torch.int16).numpy().view(np.uint16).copy()
            for weight in self._model.parameters()
        ]


def _text() -> bytes:
    """What the model learns: this repository's own sources."""
    files = sorted(Path(REPOSITORY / "services").rglob("*.py"))
    return b"\n".join(path.read_bytes() for path in files)
