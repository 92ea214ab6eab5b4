"""Published policies: manifests, digests, publishing and pulling weights through the object store (no torch)."""
