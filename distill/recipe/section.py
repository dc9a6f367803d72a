"""The base class of recipe sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Immutable, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
