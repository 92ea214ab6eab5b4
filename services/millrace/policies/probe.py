"""What proves that an engine serves a policy: the trainer's log-probs, and the contexts that they hold in."""

from dataclasses import dataclass
from typing import Self

from millrace.decoding import Fields, require_number
from millrace.errors import InvalidStateError

_MOST = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The trainer's log-probs on a fixed prompt: `logprobs[i]` is that of `token_ids[i + 1]` after those before.

    `contexts` are the least and the most tokens of the longest sequence of an engine that computes positions as the
    trainer does: only the least where there is no most, and nothing where the model's positions follow no length.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    contexts: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: Fields) -> Self:
        """The probe that an object of a manifest says; ValueError if it is none."""
        contexts = fields.integers("contexts", most=2)
        if tuple(sorted(contexts)) != contexts:
            raise ValueError(f"the probe's contexts are from {contexts[0]} to {contexts[1]} tokens")
        logprobs = (require_number(value, what="a log-prob") for value in fields.items("logprobs", most=_MOST))
        return cls(token_ids=fields.integers("token_ids", most=_MOST), logprobs=tuple(logprobs), contexts=contexts)

    def require_context(self, length: int) -> None:
        """InvalidStateError (CONTEXT_DIFFERS) if an engine of sequences up to `length` computes other positions."""
        least, most = (*self.contexts, None, None)[:2]
        if (least is None or least <= length) and (most is None or length <= most):
            return
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise InvalidStateError(
            f"the model's positions follow the longest sequence: the trainer computes those of {wanted} tokens, and "
            f"this engine serves {length}",
            reason="CONTEXT_DIFFERS",
            remedy=f"start the engine with {wanted} tokens (inference.model.max_model_len, MILLRACE_MAX_MODEL_LEN, "
            "max_model_len in MILLRACE_VLLM_FLAGS), or write into the run's inference.model.max_model_len what it has",
        )
