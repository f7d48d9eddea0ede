"""Runs inside a box: one process holds the answer, another runs a test against it and gives the verdict.

    judge (reads the test, writes the verdict)  ── calls, attributes, operators ──▶  answer (runs model-written code)
                                                ◀── plain values, handles, errors ──

The two are forked apart before the test is read, so the answer never sees the test or its expected values, cannot touch
the comparison, and has no way to the verdict: it does not hold that file, and may not look into the judge. What the
judge receives is plain data, decoded from JSON, or a handle on an object that stays with the answer.

Verdict, as JSON on standard output: ["passed"] or ["failed", why]. Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

SCALARS = (type(None), bool, int, float, str)
CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
MAKE: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in CONTAINERS.items()}
# Values of the standard library (and NumPy) that travel as themselves: (module, class) -> their parts, and back.
VALUES: dict[tuple[str, str], tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    ("builtins", "range"): (lambda v: [v.start, v.stop, v.step], lambda kind, parts: kind(*parts)),
    ("fractions", "Fraction"): (str, lambda kind, parts: kind(parts)),
    ("decimal", "Decimal"): (str, lambda kind, parts: kind(parts)),
    ("datetime", "date"): (lambda v: v.isoformat(), lambda kind, parts: kind.fromisoformat(parts)),
    ("datetime", "datetime"): (lambda v: v.isoformat(), lambda kind, parts: kind.fromisoformat(parts)),
    ("datetime", "timedelta"): (lambda v: [v.days, v.seconds, v.microseconds], lambda kind, parts: kind(*parts)),
    ("collections", "deque"): (lambda v: [list(v), v.maxlen], lambda kind, parts: kind(*parts)),
    ("collections", "Counter"): (dict, lambda kind, parts: kind(parts)),
    ("collections", "OrderedDict"): (dict, lambda kind, parts: kind(parts)),
    ("numpy", "ndarray"): (lambda v: [v.tolist(), v.dtype.str], lambda kind, parts: make_array(*parts)),
}
TESTS = "tests"  # module name of classes that a test defines


class Unusable(BaseException):
    """Raised where a test passes what cannot cross over. No `except Exception` of a test may swallow it."""


class Handle:
    """Stands for an object on the other side. `_base_` is its plain value where it is of a kind of list, int, ...

    What mixes it with plain data is settled on this side, by `_base_` or not at all: an object whose operators say
    what the test wants to hear must not be asked.
    """

    def __init__(self, peer: Peer, number: int, base: Any) -> None:
        self.__dict__.update(_peer_=peer, _number_=number, _base_=base)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of libraries, NumPy's pointers among them
            raise AttributeError(name)
        return self._peer_.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer_.ask("set", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer_.call(self, args, kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Handle) and self._peer_.ask("operator", "isinstance", instance, self) is True

    def __contains__(self, item: Any) -> bool:
        return any(item is other or item == other for other in self)

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, Handle):
            return self._number_ == other._number_ or self._peer_.ask("operator", "eq", self, other) is True
        return self._base_ is not None and bool(self._base_ == other)

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._base_ if self._base_ is not None else self._peer_.ask("operator", "hash", self))

    def __iter__(self) -> Any:
        return self._peer_.ask("operator", "iter", self)


def unary(name: str) -> Callable[..., Any]:
    return lambda self, *rest: self._peer_.ask("operator", name, self, *rest)


def binary(name: str) -> Callable[..., Any]:
    def method(self: Handle, other: Any) -> Any:
        if isinstance(other, Handle):
            return self._peer_.ask("operator", name, self, other)
        return NotImplemented if self._base_ is None else getattr(operator, name)(self._base_, other)

    return method


def reflected(name: str) -> Callable[..., Any]:
    def method(self: Handle, other: Any) -> Any:
        return NotImplemented if self._base_ is None else getattr(operator, name)(other, self._base_)

    return method


ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
ARITHMETIC += ["and_", "or_", "xor", "lshift", "rshift"]
BUILTIN = ["len", "iter", "next", "str", "repr", "int", "float", "bool", "abs", "round", "format"]
BUILTIN += ["reversed", "isinstance", "hash"]
for _name in [*BUILTIN, "neg", "pos", "invert", "getitem", "setitem", "delitem", "index"]:
    if _name not in ("iter", "isinstance", "hash"):
        setattr(Handle, f"__{_name}__", unary(_name))
for _name in [*ARITHMETIC, "lt", "le", "gt", "ge"]:
    setattr(Handle, f"__{_name.strip('_')}__", binary(_name))
for _name in ARITHMETIC:
    setattr(Handle, f"__r{_name.strip('_')}__", reflected(_name))


class Peer:
    """One end of the line. `guarded` is the judge's: it exports only what a test means to pass."""

    def __init__(self, read_fd: int, write_fd: int, guarded: bool) -> None:
        self.reader, self.writer = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")
        self.guarded = guarded
        self.exported: list[Any] = []

    def call(self, target: Handle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, changed = self.ask("call", target, args, kwargs)
        for old, new in zip(args, changed, strict=True):  # functions that work in place
            if isinstance(old, list):
                old[:] = new
            elif isinstance(old, dict | set):
                old.clear()
                old.update(new)
        return result

    def ask(self, *question: Any) -> Any:
        self.send(["ask", self.encode(list(question))])
        while True:
            kind, payload = self.receive()
            if kind == "ask":
                self.answer(payload)
            elif kind == "value":
                return self.decode(payload)
            else:
                raise exception_like(*payload)

    def serve(self) -> None:
        while True:
            _, payload = self.receive()
            self.answer(payload)

    def answer(self, payload: Any) -> None:
        try:
            reply = ["value", self.encode(self.act(*self.decode(payload)))]
        except (Unusable, ConnectionError):
            raise
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            reply = ["raised", [names, f"{type(error).__name__}: {error}"]]
        self.send(reply)

    def act(self, what: str, target: Any, *rest: Any) -> Any:
        if self.guarded and not self.may(what, target, *rest):
            raise AttributeError(f"not allowed: {what}")
        match what:
            case "call":
                result = target(*rest[0], **rest[1])
                return result, [arg if isinstance(arg, list | dict | set) else None for arg in rest[0]]
            case "get":
                return getattr(target, rest[0])
            case "set":
                return setattr(target, rest[0], rest[1])
            case "operator":
                if target == "iter" and self.guarded:
                    return (item for item in rest[0])  # of a kind that can be exported
                return getattr(builtins if target in BUILTIN else operator, target)(*rest)
            case "names":
                return {name: value for name, value in target.items() if not name.startswith("__")}
        raise AssertionError(what)

    def may(self, what: str, target: Any, *rest: Any) -> bool:
        """Return whether the answer may do this to something of the test's, whose frames and globals are private."""
        if what == "operator":
            return target in ("iter", "next", "len", "getitem", "eq", "bool", "lt")
        public = what == "call" or not str(rest[0]).startswith("_")
        return public and (isinstance(target, types.FunctionType | types.MethodType) or of_tests(target))

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind in CONTAINERS:
            return [CONTAINERS[kind], [self.encode(item) for item in value]]
        if kind is dict:
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if kind is bytes or kind is bytearray:
            return [kind.__name__, value.hex()]
        if kind is complex:
            return ["complex", [value.real, value.imag]]
        known = (kind.__module__, kind.__name__)
        if known in VALUES:
            return ["value", [*known, self.encode(VALUES[known][0](value))]]
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return self.encode(value.item())
        if kind is Handle:
            return ["yours", value._number_]
        if kind is types.ModuleType:
            return ["module", value.__name__]
        name = getattr(value, "__name__", None)
        if (
            isinstance(name, str)
            and getattr(builtins, name, None) is value
            and (self.guarded or isinstance(value, type))
        ):
            return ["builtin", name]
        return self.export(value)

    def export(self, value: Any) -> Any:
        usual = isinstance(value, types.FunctionType | types.MethodType | types.GeneratorType) or is_iterator(value)
        if self.guarded and not usual and not of_tests(value):
            raise Unusable(f"it hands a {type(value).__name__} to the answer")
        self.exported.append(value)
        base = next((b for b in (int, float, str, list, tuple, dict, set, frozenset) if isinstance(value, b)), None)
        return ["mine", [len(self.exported) - 1, None if base is None else self.encode(base(value))]]

    def decode(self, value: Any) -> Any:
        if type(value) in SCALARS:
            return value
        kind, content = value
        if kind in MAKE:
            return MAKE[kind](self.decode(item) for item in content)
        match kind:
            case "dict":
                return {self.decode(key): self.decode(item) for key, item in content}
            case "bytes" | "bytearray":
                return getattr(builtins, kind).fromhex(content)
            case "complex":
                return complex(*content)
            case "value":
                module, name, parts = content
                make = VALUES[module, name][1]
                return make(getattr(__import__(module), name), self.decode(parts))
            case "yours":
                return self.exported[content]
            case "mine":
                return Handle(self, content[0], self.decode(content[1]))
            case "module":
                return __import__(content, fromlist=["*"])
            case "builtin" if not self.guarded or isinstance(getattr(builtins, content), type):
                return getattr(builtins, content)  # functions, `eval` among them, stay with the answer
        raise ConnectionError(f"unknown kind {kind!r}")

    def send(self, message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")
        self.writer.flush()

    def receive(self) -> tuple[str, Any]:
        line = self.reader.readline()
        if not line:
            raise ConnectionError("the answer's process has ended")
        kind, payload = json.loads(line)
        return kind, payload


def make_array(items: Any, dtype: str) -> Any:
    return __import__("numpy").array(items, dtype=dtype)


def is_iterator(value: Any) -> bool:
    """Return whether it is one of Python's own, such as of a list, `map` or `zip`."""
    return type(value).__module__ in ("builtins", "itertools") and hasattr(type(value), "__next__")


def of_tests(value: Any) -> bool:
    """Return whether it is a class that the test defines, or an object of one."""
    return (value if isinstance(value, type) else type(value)).__module__ == TESTS


def exception_like(names: list[str], message: str) -> BaseException:
    """Make the nearest exception every Python has, for `except` in a test."""
    kinds = (getattr(builtins, name, None) for name in names)
    found = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)), RuntimeError)
    return found(message)


def hold_answer(peer: Peer, source: str) -> None:
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    module = sys.modules["solution"] = types.ModuleType("solution")  # where dataclasses look for it
    namespace = module.__dict__
    namespace["__builtins__"] = builtins
    try:
        exec(compile(source, "solution.py", "exec"), namespace)
    except BaseException as error:
        peer.send(["failed", f"{type(error).__name__}: {error}"])
        return
    peer.send(["ready", None])
    peer.exported.append(namespace)  # number 0
    peer.serve()


def run_test(peer: Peer, test: str, entry_points: list[str]) -> None:
    kind, why = peer.receive()
    if kind != "ready":
        raise ImportError(f"the answer cannot be imported: {why}")
    names = peer.ask("names", Handle(peer, 0, None))
    # The answer's process may say anything here. A test's `abs` or `isinstance` is Python's, whatever it calls its own
    # functions, and where Python's are looked up is not the answer's to say.
    named = {name: value for name, value in names.items() if name.isidentifier() and not name.startswith("__")}
    usable = {name: value for name, value in named.items() if not hasattr(builtins, name) or name in entry_points}
    module = types.ModuleType("solution")
    module.__dict__.update(usable)
    sys.modules["solution"] = module
    namespace = {**usable, "__name__": TESTS, "__builtins__": builtins}
    asserted: list[None] = []
    namespace["__asserted__"] = asserted
    tree = Count().visit(ast.parse(test))
    exec(compile(ast.fix_missing_locations(tree), "test.py", "exec"), namespace)
    for name, function in list(namespace.items()):
        if name.startswith("test_") and isinstance(function, types.FunctionType):
            function()
    if not asserted and any(map(must_be_reached, ast.walk(tree))):
        raise AssertionError("none of the test's asserts was reached")


def must_be_reached(node: ast.AST) -> bool:
    """Return whether it is an assert, other than `assert False` where something should have been raised."""
    return isinstance(node, ast.Assert) and not (isinstance(node.test, ast.Constant) and not node.test.value)


class Count(ast.NodeTransformer):
    """Notes that an assert was reached: a test that asserts nothing proves nothing."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        note = ast.parse("__asserted__.append(None)").body[0]
        return [ast.copy_location(note, node), node]


def main() -> None:
    sys.set_int_max_str_digits(0)
    with open("answer.py", encoding="utf-8") as file:
        source = file.read()
    (to_answer_r, to_answer_w), (to_judge_r, to_judge_w) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(to_answer_w)
        os.close(to_judge_r)
        hold_answer(Peer(to_answer_r, to_judge_w, guarded=False), source)
        os._exit(0)
    os.close(to_answer_r)
    os.close(to_judge_w)
    verdict_fd = os.dup(1)
    os.dup2(2, 1)  # what the test prints
    request = json.loads(sys.stdin.buffer.read())
    try:
        run_test(Peer(to_judge_r, to_answer_w, guarded=True), request["test"], request["entry_points"])
        verdict = ["passed"]
    except BaseException as error:
        verdict = ["failed", f"{type(error).__name__}: {error}"[:500]]
    os.write(verdict_fd, json.dumps(verdict).encode())
    os._exit(0)
