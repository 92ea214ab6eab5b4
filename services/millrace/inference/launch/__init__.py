"""The launcher of vLLM: starts it, answers for it until it is up, and ends all of it."""
