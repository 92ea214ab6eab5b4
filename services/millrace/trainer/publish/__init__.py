"""Publishing the weights as policy versions."""
