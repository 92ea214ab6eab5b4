"""How an environment scores: its reward functions, and the endpoints that they ask."""
