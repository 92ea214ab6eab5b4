"""One run from its claim to its closing header: the loop, its batches, its policies, its trainer."""
