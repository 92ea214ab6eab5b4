"""The HTTP API of an engine: access, limits of one request, OpenAI's shapes."""
