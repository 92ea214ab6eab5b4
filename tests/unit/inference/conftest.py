"""The tiny model, as fixtures."""

from millrace_testing.inference.tiny import make_model, make_staged, make_tensors, model_dir, reference

__all__ = ["make_model", "make_staged", "make_tensors", "model_dir", "reference"]
