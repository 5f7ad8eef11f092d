"""Configuration: the model, the files, and the explanation of errors.

Covers pydantic models, TOML and YAML files and environment variables, but not the objects that a
configuration creates. The facade and the command line import this package.
"""
