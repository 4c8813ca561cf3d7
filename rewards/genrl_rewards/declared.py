"""What the source of a reward declares, read without importing it (and so without torch)."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

from genrl_rewards.contract import FROM_SAMPLER, columns_of


class Declared(NamedTuple):
    """What the source says; the default for what it does not say."""

    takes: tuple[str, ...] = ()
    """What it takes: parameter names of the function, or of the class's `__call__`."""
    range: str = ""
    """The class attribute `range`."""
    doc: str = ""
    """The first line of the docstring."""
    gradients: bool | None = None
    """The attribute `differentiable`; None if the source cannot tell (a class that inherits, a decorated function)."""
    trainable: bool = False
    """Whether it is a class with `logits` (see `genrl_rewards.scorers.preference.adversary`)."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the prompt file that it needs."""
        return columns_of(self.takes)


def declared(file: Path | None, attribute: str) -> Declared:
    """What the function or class `attribute` (a dotted path) of a source file declares; nothing without a file."""
    module: list[ast.stmt] = ast.parse(file.read_bytes(), filename=str(file)).body if file is not None else []
    body = module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None = None
    for part in attribute.split("."):
        node = _definition(body, part)
        body = node.body if node is not None else []
    if node is None:
        return Declared()
    doc = (ast.get_docstring(node) or "").partition("\n")[0]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        marked = constants(module).get(f"{attribute}.differentiable") is True
        return Declared(_taken(node.args), "", doc, gradients=None if node.decorator_list else marked)
    call = _definition(node.body, "__call__")
    takes = _taken(call.args)[1:] if isinstance(call, ast.FunctionDef | ast.AsyncFunctionDef) else ()
    class_constants = constants(node.body)
    # A base class may say it, and which one that is only an import could tell.
    says = class_constants.get("differentiable", None if node.bases else False)
    gradients = None if says is None else says is True
    trainable = _definition(node.body, "logits") is not None
    return Declared(takes, str(class_constants.get("range") or ""), doc, gradients=gradients, trainable=trainable)


def declared_by(reward: Any, *, trainable: bool) -> Declared:
    """Declaration of a function, an instance or a class that is there."""
    call = reward.__call__ if inspect.isclass(reward) else reward
    parameters = list(inspect.signature(call).parameters.values())[1 if inspect.isclass(reward) else 0 :]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = tuple(p.name for p in named if p.default is p.empty or p.name in FROM_SAMPLER)
    doc = (inspect.getdoc(reward) or "").partition("\n")[0]
    gradients = bool(getattr(reward, "differentiable", False))
    return Declared(takes, str(getattr(reward, "range", "")), doc, gradients, trainable)


def misfit(file: Path, attribute: str, args: Collection[str], *, everything: bool) -> str:
    """Why what a file defines cannot be loaded or called as a reward with these args; "" where nothing in its source
    says so. everything: whether the reward may take `**kwargs`, as in TRL."""
    module = ast.parse(file.read_bytes(), filename=str(file)).body
    names = [alias.name for node in module if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in module if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    for package in sorted({name.partition(".")[0] for name in names}):
        if package not in sys.modules and _find(package, None) is None:
            return f"imports {package}, which is not installed here"
    node = _definition(module, attribute)
    if node is None:
        return f"{attribute} is a constant, no function or class" if attribute in constants(module) else ""
    if node.decorator_list:  # which may change what it takes
        return ""
    if isinstance(node, ast.ClassDef):
        init, call = _definition(node.body, "__init__"), _definition(node.body, "__call__")
        if call is None:
            return "" if node.bases else f"the class {attribute} has no __call__(images, ...), by which it would score"
        arguments = init.args if isinstance(init, ast.FunctionDef) else None
        if arguments is None and node.bases:
            return ""
        needed = _taken(arguments)[1:] if arguments is not None else ()
        if lacking := [name for name in needed if name not in (*args, "device")]:  # which loading gives
            return f"the class {attribute} is made with {', '.join(lacking)}: write rewards.args: {{{lacking[0]}: ...}}"
        options = [arg.arg for arg in (*arguments.args[1:], *arguments.kwonlyargs)] if arguments is not None else []
        open_ended = arguments is not None and arguments.kwarg is not None
    else:
        call, arguments = node, node.args
        options = [arg.arg for arg in (*arguments.args, *arguments.kwonlyargs) if arg.arg not in _taken(arguments)]
        open_ended = False
    if unknown := [] if open_ended else [name for name in args if name not in options]:
        takes = f"it has {', '.join(options)}" if options else "it has none"
        return f"{attribute} has no option {unknown[0]} (args): {takes}"
    assert not isinstance(call, ast.ClassDef)
    stars = [call.args.vararg, *call.args.posonlyargs, None if everything else call.args.kwarg]
    if declares_nothing := [arg.arg for arg in stars if arg is not None and arg.arg != "self"]:
        return f"{attribute} takes {declares_nothing[0]!r} by *, / or **, which does not say what it needs: name it"
    return ""


def lower_end(text: str) -> float | None:
    """The least score to expect, from a `range` in words: the lower end of what is `usually` scored if it says that,
    otherwise of the whole range; -inf if that is `unbounded`; None if the words do not say."""
    number = r"(-?(?:\d+\.?\d*|\.\d+))"
    match = re.search(f"usually {number}", text) or re.match(f"(?:about )?{number}", text)
    if match is not None:
        return float(match[1])
    return -math.inf if text.startswith("unbounded") else None


def _definition(body: list[ast.stmt], name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    definitions = (node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    return next((node for node in definitions if node.name == name), None)


def _taken(arguments: ast.arguments) -> tuple[str, ...]:
    """Parameters without a default, and those that the sampler fills; including `self`."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    both = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return tuple(p.arg for p, default in both if default is None or p.arg in FROM_SAMPLER)


def constants(body: list[ast.stmt]) -> dict[str, object]:
    """The constants that these statements assign, by the names to which they assign them."""
    assigned: dict[str, object] = {}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned |= dict.fromkeys(map(ast.unparse, targets), node.value.value)
    return assigned


def parse(source: str | bytes, path: str, what: str) -> ast.Module:
    """The syntax tree of a source file. Raises ValueError, with path and line, if it has a syntax error."""
    try:
        return ast.parse(source, filename=path)
    except SyntaxError as error:
        raise ValueError(f"{what} {path}, line {error.lineno}: {error.msg}") from error


def source_of(module: str) -> Path | None:
    """The source file of a module. Unlike importlib's own `find_spec`, this imports no parent package."""
    places: list[str] | None = None
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = _find(name, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    file = Path(spec.origin) if spec is not None and spec.origin else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _find(name: str, places: list[str] | None) -> ModuleSpec | None:
    specs = (finder.find_spec(name, places) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)
