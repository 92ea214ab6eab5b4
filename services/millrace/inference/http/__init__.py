"""The HTTP API of an engine: who may use it, what one request may ask for, OpenAI's shapes."""
