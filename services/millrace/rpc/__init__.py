"""gRPC between the services: one server lifecycle, one way to call, one mapping of errors."""
