"""The staging memory that a save is given before it starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.core.pipeline.staging import Staging, default_budget

if TYPE_CHECKING:
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.save.request import SaveRequest


def staging_for(
    request: SaveRequest, reusable: Staging | None, config: CheckpointerConfig
) -> Staging:
    """Staging memory within the budget: that of earlier saves where there is any."""
    budget = config.staging_bytes
    if budget is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        budget = default_budget(request.staging_bytes, local_ranks)
    budget = max(budget, 2 * config.chunk_bytes)
    staging = reusable or Staging(budget)
    staging.budget_bytes = max(staging.budget_bytes, budget)
    largest = min(request.staging_bytes, config.chunk_bytes)
    staging.expect(request.staging_bytes, largest_bytes=largest, pin=request.pin)
    return staging
