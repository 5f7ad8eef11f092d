"""Configuration: the model, the files, and the explanation of errors.

Here: pydantic models, TOML and YAML files, environment variables. Not here: the objects that a
configuration creates. The facade and the command line import this package.
"""
