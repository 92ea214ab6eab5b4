"""Agents that bring their own loop: an address per rollout at which they find the policy.

Environments of v0 derive from `agents.v0.AgentEnv`. Harnesses of v1 give their agent the endpoint that the library
hands them, which answers by the same rules (`agents.v1`). docs/guides/train_any_agent.md shows both.
"""
