"""Tiny models, engines that stand in for vLLM, and real vLLM servers."""
