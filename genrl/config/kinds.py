"""The kinds of runs: where the schema of each is found, and how a file says which one it means.

This is the only place that names them all, and it names them by strings: what a kind is made of is imported when a run
of it is read, so that shared code imports no kind and no run pays for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["diffusion", "vla", "vlm"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class _Row(NamedTuple):
    """One kind. schema: "module:class" of its `RunConfig`; section: the one by which a file says it; method: the base
    class of its methods, in the same module."""

    schema: str
    section: str
    method: str


# Looked through in this order; a file with none of the sections is of the last kind.
_ROWS: Mapping[Kind, _Row] = {
    "vla": _Row("genrl.vla.config.schema:VLAConfig", "policy", "VLAMethod"),
    "vlm": _Row("genrl.vlm.config.schema:VLMConfig", "vlm", "VLMMethod"),
    "diffusion": _Row("genrl.diffusion.config.schema:Config", "model", "DiffusionMethod"),
}


def schema_class(kind: Kind) -> Any:
    """The class of a kind's configurations, a `RunConfig`."""
    module, _, name = _ROWS[kind].schema.partition(":")
    return getattr(import_module(module), name)


def method_base(kind: Kind) -> str:
    """What a method of this kind is derived from, as it is imported."""
    return f"{_ROWS[kind].schema.partition(':')[0]}.{_ROWS[kind].method}"


def kind_section(kind: Kind) -> str:
    """The section by which a file says that it is of this kind."""
    return _ROWS[kind].section


def kind_of(data: Any) -> Kind:
    """The kind of run that a file describes which says `data`."""
    named = (kind for kind, row in _ROWS.items() if isinstance(data, Mapping) and row.section in data)
    return next(named, "diffusion")
