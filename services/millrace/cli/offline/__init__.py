"""What commands read from the object store itself, without a server."""
