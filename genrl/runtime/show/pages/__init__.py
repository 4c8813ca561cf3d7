"""Self-contained HTML pages: `render` fills a template of this folder. Everything put in is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("genrl.runtime.show.pages", ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render(name: str, values: Mapping[str, Any]) -> str:
    """The page that the template `name` ("report.html") makes of these values; text is escaped unless it is
    `markupsafe.Markup`. Raises jinja2.UndefinedError where the template uses a value that is not given."""
    return _environment().get_template(name).render(values)
