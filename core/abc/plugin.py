"""What all three contracts share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

API_VERSION = 1


class PluginConfig(BaseModel):
    """Base of every plugin's options: unknown keys are refused, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
