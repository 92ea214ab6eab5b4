"""Configs of TRL: what its keys are called here, and its files translated."""
