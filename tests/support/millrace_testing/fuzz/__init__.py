"""The fuzz lane: inputs, mutations, targets; `python -m millrace_testing.fuzz.run`."""
