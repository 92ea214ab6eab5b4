"""Workers and runs around an orchestrator under test."""
