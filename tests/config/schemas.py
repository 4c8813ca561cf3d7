"""The JSON schema of configurations, made and checked once for all tests: it takes a third of a second."""

from functools import cache
from typing import Any

import jsonschema

from genrl.config.json_schemas import json_schema


@cache
def schema_validator() -> Any:
    """Of the schema, itself checked."""
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(validator.schema)
    return validator
