"""Types of options with a range, which pydantic checks."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Lt

Positive = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
AboveZero = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]
