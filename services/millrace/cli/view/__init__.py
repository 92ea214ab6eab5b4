"""Runs as people look at them: live on a terminal, plain lines elsewhere, tables, plots."""
