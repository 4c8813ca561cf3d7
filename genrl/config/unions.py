"""The schema, for editors, of sections of one of several kinds whose kind need not be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema


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
