"""Commands that look at what runs have done: where something comes from, and how runs differ."""
