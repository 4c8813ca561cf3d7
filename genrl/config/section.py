"""What every section of a configuration is made of: the base class and the types of its values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]  # how many: 1 or more
Whole = Annotated[int, Field(strict=True, ge=0)]  # 0 or more; 0 often means off
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]  # in [0, 1)
Margin = Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)]  # in (0, 1)
Share = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]  # in (0, 1]
Ways = Annotated[int, Field(strict=True, ge=2)]
Range = tuple[Number, Number]  # [low, high]
Text = Annotated[str, Field(strict=True, min_length=1, max_length=1000)]


class Section(BaseModel):
    """What every section shares: unknown keys are errors, values cannot be changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
