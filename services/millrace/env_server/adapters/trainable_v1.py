"""Whether the episodes of a v1 environment end with as many trainable traces as the run's algorithm takes.

An environment of several trained roles, or of several attempts at a task in one episode, has more than one. Where the
algorithm takes one per rollout, that is said when the environment is loaded: else every rollout of it would fail, one
by one.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from verifiers.v1.configs.agent import AgentConfig

from millrace.env_server.own_sampling import flat
from millrace.errors import InvalidSpecError, Violation

_SETUP_S = 10.0
_BEST_OF_N = "BestOfNEnvConfig"
ONE_TRACE = "the algorithm of this environment trains one trace per rollout"
SEVERAL_TRACES = (
    'set `orchestrator.algo.type` (or `algo` of the `[[orchestrator.env]]`) to "rae" or "hierarchical_grpo"'
)
"""What to do where there are more."""

logger = logging.getLogger(__name__)


class _Roles:
    """Stands in for the agents of an episode: each is trainable until `Env.setup` says otherwise."""

    def __init__(self, configs: Mapping[str, AgentConfig]) -> None:
        self._roles = {
            name: SimpleNamespace(name=name, config=config, trainable=True) for name, config in configs.items()
        }

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name.startswith("_") or name not in self._roles:
            raise AttributeError(name)
        return self._roles[name]

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return iter(self._roles.values())

    def __len__(self) -> int:
        return len(self._roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What of an environment is trained, as far as its config says."""

    has_several: bool
    """An episode has several trainable traces."""
    roles: Sequence[str]
    """Those that are known to be trained."""


def check_trainable(env: Any, *, takes_several: bool, where: str) -> Trained:
    """Refuse an environment whose config already says that an episode has too many trainable traces, or none.

    What only its code decides is found out by the rollouts. Must run outside of an
    event loop. `where` says where the config stands in the args. Raises InvalidSpecError.
    """
    attempts = list(_several_attempts(env.config, where=where))
    configs = {name: value for name, value in env.config if isinstance(value, AgentConfig)}
    trained = _trained_roles(env, configs)
    is_wrong = trained is not None and (not trained or (len(trained) > 1 and not takes_several))
    wrong = [] if takes_several else attempts
    if is_wrong:
        wrong = [*wrong, _not_one_role(env, trained or [], where=where)]
    if wrong:
        raise InvalidSpecError(wrong)
    return Trained(has_several=bool(attempts) or len(trained or ()) > 1, roles=trained or ())


def declared_sampling(env: Any, trained: Trained, *, where: str) -> dict[str, dict[str, Any]]:
    """How trained roles have their model calls sampled where config or code say so, by where it stands in the args."""
    roles = {name: getattr(env.config, name) for name in trained.roles}
    said = {name: flat(role.sampling.model_dump(exclude_unset=True)) for name, role in roles.items() if role.sampling}
    return {f"`{where}.{name}.sampling`": fields for name, fields in said.items() if fields}


def _several_attempts(config: Any, *, where: str) -> Iterator[Violation]:
    keys = ["attempts", *(["n"] if any(base.__name__ == _BEST_OF_N for base in type(config).__mro__) else [])]
    for key in keys:
        count = getattr(config, key, 1)
        if isinstance(count, int) and count > 1:
            message = (
                f"must be 1: an episode of {count} attempts has {count} trainable traces, and {ONE_TRACE}; for several "
                "attempts at a task that are compared with each other use `orchestrator.rollouts_per_example`, or "
                f"{SEVERAL_TRACES}"
            )
            yield Violation(field=f"{where}.{key}", value=str(count), message=message)


def _not_one_role(env: Any, trained: Sequence[str], *, where: str) -> Violation:
    names = ", ".join(trained) or "none"
    kind = type(env).__name__
    if trained:
        remedy = f"{SEVERAL_TRACES}, or let `{kind}.setup` mark all roles but one `trainable = False`"
    else:
        remedy = f"let `{kind}.setup` leave a role trainable"
    message = f"{kind} trains {len(trained)} of its roles ({names}), and {ONE_TRACE}; {remedy}"
    return Violation(field=where, message=message)


def _trained_roles(env: Any, configs: Mapping[str, AgentConfig]) -> list[str] | None:
    """The roles that `Env.setup` leaves trainable; None where it does what only a real episode's agents can."""
    roles = _Roles(configs)

    async def set_up() -> None:
        async with asyncio.timeout(_SETUP_S):
            await env.setup(roles)

    try:
        asyncio.run(set_up())
    except Exception as error:  # environment code: its episodes will say what is wrong with it
        logger.debug("the roles of the environment cannot be told before an episode", exc_info=error)
        return None
    return [role.name for role in roles if role.trainable]
