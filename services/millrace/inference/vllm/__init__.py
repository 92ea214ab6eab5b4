"""vLLM as the engine: what runs inside its processes. Nothing outside this package imports vllm."""
