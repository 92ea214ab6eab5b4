"""Settings, logs, metrics and waits of every process. Imports neither grpc nor pydantic."""
