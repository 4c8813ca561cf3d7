"""What differs between two configurations, key by key."""

from __future__ import annotations

import json
from collections.abc import Mapping

from genrl.config.yaml_source import plain


def config_edits(old: str, new: str) -> dict[str, str]:
    """Dotted key -> "key: old -> new" for every leaf that differs between two YAML texts."""
    before, after = leaves(plain(old)), leaves(plain(new))
    keys = [*before, *(key for key in after if key not in before)]
    missing = object()
    return {
        key: f"{key}: {_shown(before, key)} -> {_shown(after, key)}"
        for key in keys
        if before.get(key, missing) != after.get(key, missing)
    }


def leaves(tree: object, prefix: str = "") -> dict[str, object]:
    """Dotted key -> value of everything in a configuration that is no section."""
    if isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        return {prefix.rstrip("."): tree}
    found: dict[str, object] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.")
    return found


def _shown(values: Mapping[str, object], key: str) -> str:
    return json.dumps(values[key]) if key in values else "(absent)"
