"""Commands that read the object store directly, without a server."""
