"""The model in torch: loaded, with adapters, and where each rank's share of it is."""
