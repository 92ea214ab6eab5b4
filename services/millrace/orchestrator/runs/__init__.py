"""The runs of a deployment: made, forked, listed, what users asked of them, sealed."""
