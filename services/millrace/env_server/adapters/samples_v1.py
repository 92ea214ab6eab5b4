"""Branches of a v1 trace → samples. A branch is a root-to-leaf path of message nodes that carry their own tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.env_server.adapters.failures import role_key
from millrace.env_server.adapters.outcome import Outcome
from millrace.env_server.adapters.samples import (
    Call,
    MissingTokensError,
    OwnRanges,
    Spans,
    Turn,
    check_turn,
    spans_of_roles,
)
from millrace.env_server.agents.branches import AgentCall, trained_calls
from millrace.env_server.own_sampling import AskedSampling
from millrace.rollouts.routed_experts import extended
from millrace.rollouts.types import ROLES, PolicySpan, RoleSpan, RoutedArray, Sample


def kept_nodes(trace: Any, mode: str) -> set[int]:
    """Return the Python ids of the trace's sampled nodes that are trained on.

    `mode` is the run's choice of branches (`agents.branches`): with "all", or in a trace of one branch, these are all
    sampled nodes.
    """
    nodes = list(trace.nodes)
    sampled = [index for index, node in enumerate(nodes) if node.sampled]
    if mode == "all" or len(trace.branches) < 2:
        return {id(nodes[index]) for index in sampled}
    made = [
        AgentCall(prompt=_before(nodes, index), reply=_plain(nodes[index]), num_tokens=sum(nodes[index].mask))
        for index in sampled
    ]
    return {id(nodes[sampled[at]]) for at in trained_calls(made, mode)}


def _before(nodes: Sequence[Any], index: int) -> list[dict[str, Any]]:
    """Return the messages on the path from the root to the node at `index`, without that node's, as JSON objects."""
    path: list[dict[str, Any]] = []
    at = nodes[index].parent
    while at is not None:
        path.append(_plain(nodes[at]))
        at = nodes[at].parent
    return path[::-1]


def _plain(node: Any) -> dict[str, Any]:
    """Return a node's message as a JSON object, without fields that are None."""
    return dict(node.message.model_dump(mode="json", exclude_none=True))


def branch_samples(
    branches: Sequence[Any],
    spans: Spans,
    *,
    requires_spans: bool,
    asked: AskedSampling | None = None,
    kept: Collection[int] | None = None,
) -> tuple[Sample, ...]:
    """Return one sample for each trainable branch that has a trained token; tokens that branches share are trained
    once, in the first.

    `spans` has the rollout's model calls; with `requires_spans` each token must have a policy version. Only the sampled
    nodes in `kept` (Python ids) are trained; None is all of them. Raises MissingTokensError, also if no branch has a
    trained token, and OwnSamplingError if a call deviates from `asked`, the run's sampling, in a way that cannot be
    trained on; with None that is not checked.
    """
    if not branches:
        raise MissingTokensError("the rollout made no model call")
    # Python ids identify nodes, because several branches have the same node object where they share a beginning.
    trained: set[int] = set()
    with_roles: set[int] = set()
    samples: list[Sample] = []
    noted = _noted(branches, spans)
    for branch in branches:
        if not getattr(branch, "trainable", True):  # releases before 0.4 train all
            continue
        token_ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        policy_spans: list[PolicySpan] = []
        own = OwnRanges()
        roles: list[RoleSpan] = []
        experts: RoutedArray | None = None
        is_after_reply = False
        for node in branch.nodes:
            num_sampled = sum(node.mask)
            is_new = bool(node.sampled) and id(node) not in trained and (kept is None or id(node) in kept)
            if is_new:
                turn = _turn(node, noted[id(node)], call=len(trained), requires_spans=requires_spans, asked=asked)
                trained.add(id(node))
                # The sampled tokens are a node's last; the ones before them are the template's.
                start = len(token_ids) + len(node.mask) - num_sampled
                policy_spans += [replace(span, start=start + span.start, end=start + span.end) for span in turn.spans]
                own.add(start, start + num_sampled, turn.own_way)
            # Only what follows a reply is the environment's answer; the first prompt is not.
            elif is_after_reply and not node.sampled and id(node) not in with_roles:
                with_roles.add(id(node))
                roles += spans_of_roles(_roles_of(node), start=len(token_ids))
            is_after_reply |= bool(node.sampled)
            # Nothing is replayed of an evaluation, and experts would be most of its rollout.
            if node.sampled and (asked is None or asked.is_training):
                num_before = len(token_ids) + len(node.token_ids) - num_sampled
                experts = extended(experts, noted[id(node)].routed_of(num_before + num_sampled))
            token_ids += node.token_ids
            num_prompt = len(node.token_ids) - (num_sampled if is_new else 0)
            mask += [0] * num_prompt + [1] * (len(node.token_ids) - num_prompt)
            logprobs += [0.0] * num_prompt + (list(node.logprobs or ()) if is_new else [])
        if any(mask):
            samples.append(
                # Each column has an entry for every token of the branch.
                Sample(
                    token_ids=np.asarray(token_ids, dtype=np.int32),
                    loss_mask=np.asarray(mask, dtype=np.uint8),
                    inference_logprobs=np.asarray(logprobs, dtype=np.float32),
                    policy_spans=tuple(policy_spans),
                    own_sampling=own.ranges,
                    roles=tuple(roles),
                    routed_experts=experts,
                )
            )
    if not samples:
        raise MissingTokensError("no trainable branch of the rollout has sampled tokens")
    return tuple(samples)


def _roles_of(node: Any) -> list[str]:
    """Return the role of each token of a message that the environment added; "" for tokens that the template adds.

    If the renderer does not mark which tokens are the message's content, all have the role.
    """
    name = str(node.message.role)
    role = name if name in ROLES else ""
    contents = getattr(node, "is_content", None) or ()
    if len(contents) != len(node.token_ids):
        return [role] * len(node.token_ids)
    return [role if is_content else "" for is_content in contents]


def _noted(branches: Sequence[Any], spans: Spans) -> dict[int, Call]:
    """Return the model call of each sampled node, by the node's Python id, and take these calls out of `spans`.

    Nodes of untrained branches use up calls, too.
    """
    noted: dict[int, Call] = {}
    for branch in branches:
        before: list[int] = []
        for node in branch.nodes:
            num_prompt = len(node.token_ids) - sum(node.mask)
            if node.sampled and id(node) not in noted:
                prompt_ids = [*before, *node.token_ids[:num_prompt]]
                noted[id(node)] = spans.find(node.token_ids[num_prompt:], prompt_ids)
            before += node.token_ids
    return noted


def _turn(node: Any, found: Call, *, call: int, requires_spans: bool, asked: AskedSampling | None) -> Turn:
    """Return a sampled node as a checked turn with its model call `found`; the node's last tokens are the sampled ones.

    The prompt is not in the turn. `call` is the model call's number, for messages. `asked` is the run's sampling, with
    which the call is compared; None is not compared. Raises MissingTokensError (with `requires_spans` also for missing
    policy versions) and OwnSamplingError.
    """
    num_sampled = sum(node.mask)
    if not num_sampled or not all(node.mask[-num_sampled:]):
        raise MissingTokensError(f"model call {call}: the trace has no token ids; the engine must return `token_ids`")
    turn = Turn(
        # The prompt is in the nodes before; here only its presence is checked.
        prompt_ids=[0],
        completion_ids=node.token_ids[-num_sampled:],
        logprobs=node.logprobs or (),
        spans=found.spans,
        own_way=None if asked is None else asked.own_way(found.sent),
    )
    check_turn(turn, index=call, requires_spans=requires_spans)
    return turn


# Several trainable traces of one v1 episode as one outcome.


def merged(agents: Sequence[str], each: Sequence[Outcome]) -> Outcome:
    """Merge the outcomes of an episode's agents into one; `agents` has the name of each.

    Its reward is the mean of theirs. Each agent's reward and metrics are metrics under `AGENT/NAME`, turns and seconds
    are added up, conversations follow each other. Samples and traces are left empty.
    """
    own: dict[str, list[float]] = {}
    for agent, played in zip(agents, each, strict=True):
        for name, value in {"reward": played.reward, **played.metrics}.items():
            own.setdefault(f"{agent}/{name}", []).append(value)
    return Outcome(
        status=each[0].status,
        reward=sum(played.reward for played in each) / len(each),
        metrics={name: sum(values) / len(values) for name, values in own.items()},
        stop_condition=each[0].stop_condition,
        is_truncated=any(played.is_truncated for played in each),
        num_turns=sum(played.num_turns for played in each),
        model_s=sum(played.model_s for played in each),
        messages=[message for agent, played in zip(agents, each, strict=True) for message in _shown(agent, played)],
    )


def _shown(agent: str, played: Outcome) -> list[Mapping[str, Any]]:
    """Return an agent's conversation after a message with the agent's name."""
    return [{"role": "note", "content": f"agent {agent}, reward {played.reward:g}"}, *played.messages]


def timeout_remedy(message: str, trace: Any) -> str:
    """Return the remedy for a deadline that the environment's config sets and that was missed: which key to raise.

    `message` is the error's, which names the stage; the role is that of `trace`, "agent" without one.
    """
    role = str(getattr(getattr(trace, "agent", None), "name", None) or "agent")
    stages = [stage for stage in ("setup", "finalize", "scoring") if stage in message]
    key = role_key(f"{role}.timeout.{stages[0] if stages else 'rollout'}")
    return f"raise {key} (in seconds), or find what takes so long"
