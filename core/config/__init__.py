"""Configuration: the model, the files, and the explanation of errors.

Covers pydantic models, files in TOML, YAML or JSON, and environment variables, but not the objects
that a configuration creates. The facade and the command line import this package.
"""
