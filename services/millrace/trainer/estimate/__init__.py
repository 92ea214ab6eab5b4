"""What a training step takes of memory and time, before anything is paid for it."""
