"""The orchestrator service: the public API, the workers' registry, and the loop that drives each claimed run."""
