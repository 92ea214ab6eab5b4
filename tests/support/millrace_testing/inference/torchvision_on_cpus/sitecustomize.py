"""Has torchvision that is made for GPUs import beside torch for CPUs: it loads no operators, and asks for two of them.

Python runs this at the start of every process that has this directory in PYTHONPATH; vLLM looks at models in others.
"""

import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")
