"""The lossless delta codec between two versions of a tensor."""
