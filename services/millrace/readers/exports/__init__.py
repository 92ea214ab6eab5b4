"""A run's log as other tools read it: metrics by step, and samples; files, TensorBoard and W&B are made of these."""
