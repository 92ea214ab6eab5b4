"""What replicas on real vLLM report to."""

from millrace_testing.inference.registry import orchestrator

__all__ = ["orchestrator"]
