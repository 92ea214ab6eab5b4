"""What every process says about itself: settings, logs, and what it waits for. Imports neither grpc nor pydantic."""
