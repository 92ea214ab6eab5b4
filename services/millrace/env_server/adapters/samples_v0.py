"""The steps of a v0 rollout → turns, and the tokens that the library has cut off them.

With `max_seq_len` an environment has the library cut what a model call brought: the ends of completions, or all of them
where the prompt alone is longer. What is left is trained on; a turn of which nothing is left is not, and what it earned
counts as earned by the turn before it. None of it is the engine's doing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.env_server.adapters.outcome import NotANumberError, number_of
from millrace.env_server.adapters.samples import MissingTokensError, Spans, Turn, clipped
from millrace.env_server.agents.branches import LEFT_OUT_METRIC
from millrace.env_server.agents.v0 import IS_TRAINED
from millrace.env_server.own_sampling import AskedSampling
from millrace.rollouts.types import CUT_METRIC


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTurns:
    """The turns of a rollout that are trained on, and counts of what is not."""

    kept: Sequence[Turn]
    num_cut: int
    """Sampled tokens that were cut off."""
    why_cut: str
    """Why nothing is left of the last turn of which that is so; empty if there is none."""
    num_left_out: int = 0
    """Model calls of an agent whose branch is not trained on."""
    is_agent: bool = False
    """Whether an agent with a loop of its own made them."""

    @property
    def metrics(self) -> dict[str, float]:
        """Return the rollout's metrics of tokens that were cut and calls that were left out, without zeros."""
        counts = {CUT_METRIC: self.num_cut, LEFT_OUT_METRIC: self.num_left_out}
        return {name: float(count) for name, count in counts.items() if count}

    @property
    def are_all_cut(self) -> bool:
        """Return whether no turn is left to train on, because the library cut off all the tokens that were sampled
        in one.
        """
        return not self.kept and bool(self.why_cut)


def turns_of(steps: Sequence[Mapping[str, Any]], spans: Spans, asked: AskedSampling) -> KeptTurns:
    """Return the turns of a rollout's steps that are trained on, in order, with counts of what is not.

    Each step takes its model call out of `spans`; `asked` is the sampling that the run asks for. Steps of an agent in a
    branch that is not trained on are left out. So is a turn whose sampled tokens were all cut; its reward is added to
    the turn before it, or to the next one if there is none before. Raises MissingTokensError for a step without tokens,
    NotANumberError for a reward that is no number, and OwnSamplingError for sampling that cannot be trained on.
    """
    kept: list[Turn] = []
    num_cut, num_left_out, why = 0, 0, ""
    is_agent = False
    carried: float | None = None
    for index, step in enumerate(steps):
        tokens = step.get("tokens")
        if not tokens:
            raise MissingTokensError(
                f"model call {index}: the engine returned no token ids or log-probs "
                "(it must support `logprobs` and `return_token_ids`)"
            )
        prompt, whole = _answered(step, tokens)
        completion_ids = tokens["completion_ids"]
        # Taken for every step, trained or not, so that later steps find their own calls.
        call = spans.find(whole, prompt)
        extras = step.get("extras") or {}
        is_agent = is_agent or IS_TRAINED in extras
        if not extras.get(IS_TRAINED, True):
            num_left_out += 1
            continue
        own_way, reward = asked.own_way(call.sent), _step_reward(step.get("reward"), number=index + 1)
        num_cut += len(whole) - len(completion_ids)
        if whole and not completion_ids:
            why = _nothing_left(index, tokens, num_prompt=len(prompt))
            if kept:
                kept[-1] = replace(kept[-1], reward=_both(kept[-1].reward, reward))
            else:
                carried = _both(carried, reward)
            continue
        reward, carried = _both(carried, reward), None
        # Nothing is replayed of an evaluation, and experts would be most of its rollout.
        has_experts = asked.is_training and len(tokens["prompt_ids"]) == len(prompt)
        kept.append(
            Turn(
                prompt_ids=tokens["prompt_ids"],
                completion_ids=completion_ids,
                logprobs=tokens["completion_logprobs"],
                spans=clipped(call.spans, len(completion_ids)),
                own_way=own_way,
                reward=reward,
                asked_by=_asked_by(step.get("prompt")),
                routed=call.routed_of(len(prompt) + len(completion_ids)) if has_experts else None,
            )
        )
    return KeptTurns(kept=kept, num_cut=num_cut, why_cut=why, num_left_out=num_left_out, is_agent=is_agent)


def _asked_by(prompt: Any) -> str:
    """Return the role of the messages after the last reply in a prompt; "" without a reply, if no message follows,
    or if the roles differ.
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return ""
    following: set[str] = set()
    for each in reversed(prompt):  # up to the last reply: a prompt has every turn before it
        role = str(each.get("role") if isinstance(each, Mapping) else getattr(each, "role", ""))
        if role == "assistant":
            return following.pop() if len(following) == 1 else ""
        following.add(role)
    return ""


def _both(first: float | None, second: float | None) -> float | None:
    """Return the sum of two turns' rewards; None if neither turn has one."""
    given = [reward for reward in (first, second) if reward is not None]
    return sum(given) if given else None


def _answered(step: Mapping[str, Any], tokens: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
    """Return (prompt ids, sampled ids) of a model call as they were before the library cut them.

    The ids in `tokens`, which the library has cut, are returned if the step's response has none, or if the cut sampled
    ids are not the beginning of the response's.
    """
    message = getattr(step.get("response"), "message", None)
    whole = getattr(message, "tokens", None)
    prompt, sampled = getattr(whole, "prompt_ids", None), getattr(whole, "completion_ids", None)
    left = tokens["completion_ids"]
    if prompt is None or sampled is None or list(sampled[: len(left)]) != list(left):
        return tokens["prompt_ids"], left  # an environment's own tokens
    return prompt, sampled


def _nothing_left(index: int, tokens: Mapping[str, Any], *, num_prompt: int) -> str:
    """Return the message why nothing is left of the tokens sampled in model call `index`.

    `num_prompt` is the length of its prompt before the library cut it.
    """
    if not tokens.get("is_truncated"):
        return f"the environment has taken out all that was sampled in model call {index}; leave a turn that is trained"
    return (
        f"the prompt of model call {index} has {num_prompt} tokens and the environment's `max_seq_len` is "
        f"{len(tokens['prompt_ids'])}, so nothing that was sampled there is left; raise it, or leave it out: "
        "`orchestrator.seq_len` bounds samples, too"
    )


def _step_reward(value: Any, *, number: int) -> float | None:
    """Return the reward of a step as a float; None if it has none. `number` is the turn's, for messages.

    Raises NotANumberError.
    """
    if value is None:
        return None
    try:
        return number_of(value)
    except NotANumberError as error:
        raise NotANumberError(f"the reward of turn {number} is {error}; fix what the environment adds") from error
