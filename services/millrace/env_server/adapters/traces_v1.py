"""Several trainable traces of one v1 episode as one outcome."""

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.env_server.adapters.failures import role_key
from millrace.env_server.adapters.outcome import Outcome


def merged(agents: Sequence[str], each: Sequence[Outcome]) -> Outcome:
    """What is said of the whole episode: the mean of the agents' rewards, and each one's numbers behind its name."""
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
    """An agent's conversation behind a line with its name."""
    return [{"role": "note", "content": f"agent {agent}, reward {played.reward:g}"}, *played.messages]


def timeout_remedy(message: str, trace: Any) -> str:
    """Return which of the environment's args sets the deadline."""
    role = str(getattr(getattr(trace, "agent", None), "name", None) or "agent")
    stages = [stage for stage in ("setup", "finalize", "scoring") if stage in message]
    key = role_key(f"{role}.timeout.{stages[0] if stages else 'rollout'}")
    return f"raise {key} (in seconds), or find what takes so long"
