"""What keeps an environment's processes from what is around them: limits, powers, files, network."""
