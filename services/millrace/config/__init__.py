"""The config of runs: one schema with prime-rl's key names, its sources, and messages for everything that can be wrong.

`schema` holds the sections, `load` turns a command line, files and the environment into one, and `validate_document`
checks a JSON document that arrives at a server. Nothing heavy is imported here: pydantic only.
"""
