"""Mistakes of a first day, each made for real at the real command: what it says, and after how many seconds."""
