"""The interface of engines to the inference service, without torch.

An engine has at most one model and generates with it. The service around it decides *which* policy version it has
(`updater.py`): for that it needs a `PolicyEngine`. Our own HTTP API (`http/server.py`) needs an `Engine`, which
generates as well; vLLM has an HTTP API of its own. An engine works on tokens, not text, except for stop strings.

The protocol is shaped so that an engine in a child process can implement it as well: every method is asynchronous, all
arguments are plain values, and the stages of an update that may fail harmlessly (`check`) and harmfully
(`apply_policy`) are separate calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.errors import InvalidStateError
from millrace.policies.manifest import AdapterEntry, StagedPolicy
from millrace.policies.peft.config import AdapterSpec, Shape, adapter_problems
from millrace.rollouts.routed_experts import RoutedForm
from millrace.rollouts.types import PolicySpan, RoutedArray

STALL_S = 60.0
"""An engine that has work and did nothing for this long counts as hanging."""


class InflightMode(StrEnum):
    """How requests in flight continue after an update."""

    KEEP = "keep"
    """Go on with the KV cache that the old version wrote."""
    RECOMPUTE = "recompute"
    """Recompute the KV cache of prompt and completion with the new version, then go on."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the longest context."""
    ABORT = "abort"
    """Aborted by its caller, or the model was replaced; the result is not to be used."""
    ERROR = "error"
    """The model gave values that are not finite; the result is not to be used."""


class EngineState(StrEnum):
    """Whether an engine can generate."""

    EMPTY = "empty"
    """No model is loaded."""
    READY = "ready"
    """Generates, or is paused."""
    FAILED = "failed"
    """An operation failed in a way that leaves the model undefined; only `load` makes it READY again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyIdentity:
    """Which policy an engine holds: (lineage, version) of a run; an empty run is a fixed model."""

    run_uid: str
    lineage: int
    version: int

    def __str__(self) -> str:
        return f"{self.run_uid or 'fixed'}/{self.lineage}-{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` None draws a random one; a seed gives
    the same tokens whatever else is in the batch, up to floating-point rounding. Stop tokens stay part of the
    completion. `stop` are stop strings; the engine stops after the token that completes one, in the text that the
    caller gets: `skip_special_tokens` leaves special tokens out of it.

    `repetition_penalty` divides the logits above 0 of tokens that are in prompt or completion, and multiplies those
    below; `presence_penalty` is subtracted from the logits of tokens of the completion, `frequency_penalty` once for
    each time that they are in it. No stop token is sampled before there are `min_tokens`. Log-probs are those of the
    resulting distribution.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0

    @property
    def has_penalties(self) -> bool:
        """Return whether logits depend on earlier tokens of the request: by a penalty, or by `min_tokens`."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty, self.min_tokens)
        return any(penalties)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One completion to generate; `request_id` is unique among the requests in flight.

    Requests with the same `call_id` take turns as one; "" is a call of its own. `adapter` is the adapter that shall
    generate, one of many that the engine has; None is the policy that the engine was updated to.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    call_id: str = ""
    adapter: PolicyIdentity | None = None

    @property
    def fairness_key(self) -> str:
        """Return the key that requests of one call share, which take turns as one: the call's id, else the
        request's own.
        """
        return self.call_id or self.request_id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """A finished completion.

    `token_ids` int32 [T]. `logprobs` float32 [T]: of each token under the distribution that it was sampled from, that
    is after temperature, min-p, top-k and top-p (under plain softmax for greedy requests). `policy_spans` cover [0, T)
    in order. `stop_reason` is the stop token id or stop string that ended it, None for an end-of-sequence token.
    `routed_experts` are those of each token of prompt and completion but the last, [tokens, layers, top_k]; None if the
    engine does not record them.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    policy_spans: tuple[PolicySpan, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    routed_experts: RoutedArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """Log-probs and ranks of the tokens of a prompt of T tokens, of each but the first given those before it, [T - 1].

    `logprobs` float32 at temperature 1; `ranks` int32, 1 for the likeliest token of its place. `policy` is the policy
    that computed them, None if that is not known.
    """

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    policy: PolicyIdentity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The present state of an engine. `progress_age_s` is the time since its last progress while it has work.

    A dead engine does nothing at all, not even `load`: its process has to be restarted.
    """

    state: EngineState
    identity: PolicyIdentity | None
    is_paused: bool
    num_running: int
    num_waiting: int
    max_num_seqs: int
    max_model_len: int
    progress_age_s: float
    num_generated_tokens: int
    num_finished: int
    error: str = ""
    is_dead: bool = False
    pause_s: float | None = None
    """Seconds of the last standstill, of an engine that generates again before the proof; None for other engines."""
    has_memory: bool = True
    """Whether its weights are on the device: not while it sleeps, or if it could not wake."""
    routed: RoutedForm | None = None
    """What the experts of tokens in its results look like; None if it records none, or does not say."""

    @property
    def num_requests(self) -> int:
        """Return the number of the engine's requests that run or wait."""
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDigest:
    """The digest (hex) of the policy that an engine has, and how it was found: `readback`, `probe` or both with `+`."""

    digest: str
    proof: str


class PolicyEngine(Protocol):
    """An engine with one model. All methods but `status` may be called concurrently from one event loop."""

    @property
    def kind(self) -> str:
        """Return the engine's name in statuses, such as "embedded"."""
        ...

    async def load(self, model_dir: Path, staged: StagedPolicy | None, *, identity: PolicyIdentity) -> None:
        """Replace the model by the one that `model_dir` describes (config, tokenizer); it is `identity` from then on.

        Weights come from `staged`, or from the directory's safetensors files if that is None. A failure before the
        present model is touched raises and leaves it; a later one leaves the engine FAILED. Requests in flight end with
        ABORT.
        """
        ...

    async def check(self, staged: StagedPolicy) -> None:
        """Raise InvalidStateError if `apply_policy` could not take this policy; changes nothing that is served.

        An engine may do work here, while it serves, so that `apply_policy` takes less time.
        """
        ...

    async def apply_policy(
        self, staged: StagedPolicy, *, identity: PolicyIdentity, inflight_mode: InflightMode
    ) -> None:
        """Write the staged policy's weights into the model, between two decode steps. A failure leaves the engine
        FAILED.

        Tokens are `identity`'s from then on. `inflight_mode` decides about the KV cache of requests in flight. Where
        the engine can, only `staged.changes` are written, if they are known.
        """
        ...

    async def prove(self, staged: StagedPolicy, *, opens: bool = True) -> HeldDigest:
        """Prove that the engine has the staged policy, and return its digest; raise InternalError that names the
        difference.

        `opens` False is a policy that is not to be served, because an adapter on it follows. An engine that answers
        requests between `apply_policy` and the end of this call keeps the answers back.
        """
        ...

    async def fail(self, error: str) -> None:
        """Make the model unusable: the engine is FAILED with this error, and requests in flight end with ABORT."""
        ...

    async def abort_all(self) -> None:
        """End every request of the engine with ABORT."""
        ...

    async def pause(self, holder: str) -> None:
        """Stop generation between two tokens until every holder that has paused it resumes; the same holder counts
        once.

        The holder `pauses.SLEEP` also frees the memory on the device, weights and KV cache; an engine on a CPU keeps
        it. Raises InvalidStateError if the engine was not started for that.
        """
        ...

    async def resume(self, holder: str) -> None:
        """End this holder's pause; generation goes on when no other holder pauses it."""
        ...

    def status(self) -> EngineStatus:
        """Return the engine's status, cheaply; may be called from any thread."""
        ...

    async def close(self) -> None:
        """Abort all requests of the engine and free everything that it holds."""
        ...


class Engine(PolicyEngine, Protocol):
    """Generates with the model that it holds."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one completion and return it. Cancelling the call aborts the request.

        Raises UnavailableError when no model is held, InvalidStateError when the prompt does not fit the context.
        """
        ...

    async def score(self, token_ids: tuple[int, ...]) -> PromptScores:
        """Return log-prob and rank of each given token but the first under the present policy, by a plain forward pass.

        Raises UnavailableError when no model is held, InvalidStateError when the tokens do not fit the context.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End the request with that id with ABORT; an unknown id is ignored."""
        ...


def require_fit(problems: Sequence[str], *, what: str, reason: str, remedy: str) -> None:
    """Raise InvalidStateError if there are problems why a policy or adapter (`what`) does not fit; the first five
    are named.
    """
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InvalidStateError(
            f"the {what} does not fit the model: {'; '.join(problems[:5])}{more}",
            reason=reason,
            remedy=remedy,
        )


# Whether an adapter fits the model that an engine holds. No torch.


def spec_of(entry: AdapterEntry) -> AdapterSpec:
    """Return the adapter of a manifest as the description with which its tensors are checked."""
    return AdapterSpec(
        rank=entry.rank, alpha=entry.alpha, target_modules=entry.target_modules, modules_to_save=entry.modules_to_save
    )


def require_fitting(staged: StagedPolicy, base: Mapping[str, Shape]) -> None:
    """Raise InvalidStateError, naming tensors, unless the staged adapter fits the base model.

    `base` has dtype and shape of each of the base's weights by name.
    """
    entry = staged.manifest.adapter
    problems = ["it is none"]
    if entry is not None:
        tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in staged.tensors.items()}
        problems = adapter_problems(spec_of(entry), tensors, base, source="the adapter")
    require_fit(
        problems,
        what="adapter",
        reason="ADAPTER_MODEL_MISMATCH",
        remedy="publish the adapter with the base model and the number format that it was trained on",
    )


# The probe of a policy: the trainer's log-probs on a fixed prompt against those of an engine.
#
# The digest proves bits; the probe proves that the engine computes with them. It is the only proof for layouts that
# do not give the published bits back. It compares means over the prompt, because single tokens of low probability
# differ most: `mean |found - expected| <= mean (ABSOLUTE + RELATIVE * |expected|)`.
#
# The tolerances follow the coarsest number format on the way. Measured against an HF forward pass (fp32 master
# weights in the trainer): fp32 engine mean 4e-7, bf16-rounded weights mean 6e-3, bf16 arithmetic mean 1e-2 at log-
# probs around -4. A logit of size L carries an error of a few L * 2**-8 in bf16, hence the relative part; the
# absolute part is five to a hundred times the measured mean. A policy with one layer of another version differs by
# 1e-2 and more in fp32 at RL's usual steps; in bf16 only the digest sees that little.

_TOLERANCES = {"float32": (1e-4, 1e-5), "float16": (1e-2, 2e-3), "bfloat16": (5e-2, 1.6e-2)}


def probe_problem(expected: Sequence[float], found: Sequence[float], *, dtypes: Sequence[str]) -> str | None:
    """Return a sentence on how an engine's log-probs `found` [T] differ from the trainer's, `expected`; None if they
    agree.

    `dtypes` are the number formats on the way (published, computed); the coarsest one sets the tolerance.
    """
    absolute, relative = max(_TOLERANCES.get(dtype, _TOLERANCES["bfloat16"]) for dtype in dtypes)
    want, have = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    if want.shape != have.shape:
        return f"the engine gave {have.size} log-probs on the probe's prompt, the manifest has {want.size}"
    if not np.isfinite(have).all():
        return "the engine's log-probs on the probe's prompt are not finite"
    gap, limit = float(np.abs(have - want).mean()), float((absolute + relative * np.abs(want)).mean())
    if gap <= limit:
        return None
    return f"the engine's log-probs on the probe's prompt differ from the trainer's by {gap:.2g} in the mean"
