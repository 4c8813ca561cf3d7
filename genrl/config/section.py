"""What every section of a configuration is made of: the base class and the types of its values."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic._internal._model_construction import ModelMetaclass
from pydantic_core import CoreSchema

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


class _Explained(ModelMetaclass):
    """What a script makes by calling the class is refused with the words and suggestions of YAML files. Sections within
    others do not come this way, so that their errors keep their places."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            from genrl.config.messages import explained  # which knows the schemas of all sections

            raise (explained(cls, values, error) or error) from None


class Section(BaseModel, metaclass=_Explained):
    """What every section shares: unknown keys are errors, values cannot be changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def meaning(cls, key: str) -> str:
        """The text under a key where it is declared; empty where there is none.

        pydantic can read these texts too, but for every class when it is made, a fifth of what `genrl check` does.
        """
        declared = next(base for base in cls.__mro__ if key in vars(base).get("__annotations__", {}))
        return cls.model_fields[key].description or _texts(declared.__module__).get((declared.__name__, key), "")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        for key, field in cls.model_fields.items():
            if text := cls.meaning(key):
                schema["properties"][field.alias or key]["description"] = text
        return schema


@cache
def _texts(module: str) -> dict[tuple[str, str], str]:
    """(class, key) of a module -> the text under the key; empty where its source is not there."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    return {
        (node.name, key.target.id): inspect.cleandoc(text.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for key, text in pairwise(node.body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@dataclass(frozen=True)
class AnyOf:
    """Annotation of a discriminated union that is validated after what is left out was filled in: a section that says
    no kind fits several, which pydantic's `oneOf` refuses. alone: the kind alone may stand in place of a section."""

    alone: bool = False

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        kinds = schema.pop("oneOf")
        if self.alone:
            kinds = [{"enum": list(schema["discriminator"]["mapping"]), "type": "string"}, *kinds]
        return {"anyOf": kinds, **schema}
