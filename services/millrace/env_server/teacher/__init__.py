"""The teacher of a distillation: its requests, its checks, and the storing of its scores."""
