"""Adapters of the PEFT library: what one says, whether it can be merged, and the model that it makes. No torch."""
