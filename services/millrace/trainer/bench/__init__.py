"""Steps of the trainer in isolation, on fake samples: what `--bench` measures."""
