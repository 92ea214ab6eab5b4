"""Recorded runs: logs, policies, events, and a client that plays them."""
