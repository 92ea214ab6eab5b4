"""Steps of a run computed again from its log."""
