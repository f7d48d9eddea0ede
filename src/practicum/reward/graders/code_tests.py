"""Whether test code can be used at all, told from its text: before the run, and whatever an answer does."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from practicum.reward.sandbox import judge

_CROSSING = {*judge.SCALARS, *judge.CONTAINERS, dict, bytes, bytearray, complex, type}
_NOT_IMPORTED_HERE = {"this", "antigravity", "idlelib", "turtle", "tkinter", "turtledemo", "__main__"}
_OF_CLASSES = {
    "__name__",
    "__qualname__",
    "__doc__",
    "__module__",
    "__annotations__",
    "__dict__",
    "__mro__",
    "__bases__",
}
_EXPECTS_ERRORS = {"raises", "assertRaises", "assertRaisesRegex", "suppress"}


@lru_cache(maxsize=1024)  # the answers to one prompt come close together
def problem_of(
    test: str, apart: bool, entry_points: frozenset[str] = frozenset(), packages: bool = False
) -> str | None:
    """Return why a test cannot be used, or None. `entry_points` are names of Python's own that the answer defines.

    With `apart`, answer and test run in two processes (see sandbox/judge.py).
    """
    try:
        tree = ast.parse(test)
        found = next(_problems(tree, packages), None)
        if found is None and apart:
            found = next(_what_cannot_cross(tree, _names_of_the_answer(tree, entry_points)), None)
            found = found and f"{found}, which cannot be done from another process: set the option tests: together"
    except (SyntaxError, ValueError) as error:
        return f"is no Python: {error}"
    except (RecursionError, MemoryError):
        return "is nested too deeply"
    return found


def _problems(tree: ast.Module, packages: bool) -> Iterator[str]:
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(tree)):
        yield f"asserts and calls nothing, so that any answer would pass: {ast.unparse(tree)!r:.80}"
    tried = {id(node) for part in ast.walk(tree) if isinstance(part, ast.Try) for node in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in tried:
            missing = next((name for name in _modules(node) if not _is_there(name, packages)), None)
            if missing is not None:
                yield f"imports {missing}, which is not there in the sandbox (see the option packages)"
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unreached: set[int] = set()
    for definition in tree.body:
        if isinstance(definition, ast.FunctionDef) and definition.name.startswith("test_"):
            arguments = definition.args
            needed = [*arguments.posonlyargs, *arguments.args][: -len(arguments.defaults) or None]
            if needed:
                yield f"has {definition.name}({needed[0].arg}), which is called without arguments"
        elif isinstance(definition, ast.FunctionDef | ast.ClassDef) and definition.name not in loaded:
            unreached |= {id(node) for node in ast.walk(definition)}
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if asserts and all(id(node) in unreached for node in asserts):
        yield "asserts only in functions or classes that nothing calls"


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [] if node.level else [(node.module or "").partition(".")[0]]


def _is_there(module: str, packages: bool) -> bool:
    if module in sys.stdlib_module_names or module == "solution":
        return True
    try:
        return packages and find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _names_of_the_answer(tree: ast.Module, entry_points: frozenset[str]) -> set[str]:
    """Return the names that a test uses and does not define itself."""
    bound: set[str] = set()
    imported: set[str] = set()
    loaded: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                loaded.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                bound.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names = {alias.asname or alias.name.partition(".")[0] for alias in aliases}
                (imported if _modules(node) == ["solution"] else bound).update(names)
    return (loaded - bound - (set(dir(builtins)) - entry_points)) | imported


def _what_cannot_cross(tree: ast.Module, theirs: set[str]) -> Iterator[str]:
    """Yield what a test does with names of the answer that only works in the answer's own process."""
    values = _values(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(bases=bases):
                yield from (f"subclasses {name}" for name in _rooted(bases, theirs))
            case ast.ExceptHandler(type=ast.expr() as caught):
                parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
                yield from (f"catches {name}" for name in _rooted(parts, theirs))
            case ast.MatchClass(cls=kind):
                yield from (f"matches {name}" for name in _rooted([kind], theirs))
            case ast.With(items=items):
                entered = [item.context_expr for item in items]
                yield from (f"enters {name}" for name in _rooted(entered, theirs))
            case ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                yield "awaits"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio")), args=arguments):
                yield from (f"runs {name} in an event loop" for name in _rooted(arguments, theirs))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if name in _EXPECTS_ERRORS:
                yield from (f"catches {name}" for name in _rooted(arguments, theirs))
            case ast.Call(func=ast.Name(id="issubclass"), args=arguments):
                yield from (f"asks for the bases of {name}" for name in _rooted(arguments, theirs))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="inspect" | "dataclasses")), args=arguments):
                yield from (f"inspects {name}" for name in _rooted(arguments, theirs))
            case ast.Compare(left=left, comparators=others) if any(map(_is_type_of, (left, *others))):
                kinds = [kind for kind in (left, *others) if not isinstance(kind, ast.Call)]
                yield from (f"compares a type with {name}" for name in _rooted(kinds, theirs))
            case ast.Attribute(value=ast.Name() as owner, attr=name) if name in _OF_CLASSES:
                yield from (f"asks for {of}.{name}" for of in _rooted([owner], theirs))
        if isinstance(node, ast.Call) and any(_rooted([node.func], theirs)):
            for given in [*node.args, *(keyword.value for keyword in node.keywords)]:
                foreign = _foreign(given, values)
                if foreign is not None:
                    yield f"hands a {foreign.__name__} to the answer"


def _is_type_of(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name) and expression.func.id == "type"


def _rooted(expressions: list[ast.expr], names: set[str]) -> Iterator[str]:
    """Yield the names of which expressions are attributes, items or results."""
    for expression in expressions:
        while isinstance(expression, ast.Attribute | ast.Call | ast.Subscript):
            expression = expression.func if isinstance(expression, ast.Call) else expression.value
        if isinstance(expression, ast.Name) and expression.id in names:
            yield expression.id


def _values(tree: ast.Module) -> dict[str, Any]:
    """Return what a test's names stand for: imported modules and their members, and expressions assigned once."""
    values: dict[str, Any] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    values[alias.asname or name] = _module(name)
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                for alias in aliases:
                    values[alias.asname or alias.name] = getattr(_module(module), alias.name, None)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = None if name in values else value
    return values


def _module(name: str) -> Any:
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names or top in _NOT_IMPORTED_HERE:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _foreign(given: ast.expr, values: dict[str, Any]) -> type | None:
    """Return the class of what an expression makes if objects of it cannot cross over."""
    if isinstance(given, ast.Name):
        assigned = values.get(given.id)
        return _foreign(assigned, values) if isinstance(assigned, ast.Call) else None
    if isinstance(given, ast.List | ast.Tuple | ast.Set):
        return next((kind for part in given.elts if (kind := _foreign(part, values)) is not None), None)
    if not isinstance(given, ast.Call):
        return None
    match given.func:
        case ast.Name(id=name):
            kind = values.get(name) if name in values else getattr(builtins, name, None)
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            kind = getattr(values.get(module), name, None)
        case _:
            return None
    iterates = isinstance(kind, type) and kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    if not isinstance(kind, type) or iterates or kind in _CROSSING or (kind.__module__, kind.__name__) in judge.VALUES:
        return None
    return kind
