"""The code that runs in vLLM's worker processes: the bits of the model, and how a version gets into them."""
