"""vLLM as the engine: the code that runs inside its processes. Nothing outside this package imports vllm."""
