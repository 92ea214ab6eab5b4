"""The code that runs in vLLM's API server: its start, its routes, and the gate before its engine."""
