"""Settings of a config, read from its source: what a help text needs, without the seconds that torch takes to import.

The classes of settings stand beside what they are settings of, so that importing one imports torch and TorchRL. Here
nothing below ``torchrl_perf`` is imported: a class is made again of the annotations, defaults and descriptions that its
file holds, and a constant is evaluated once it is asked for.
"""

import ast
import dataclasses
import importlib
import itertools
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

__all__ = ["Source"]

PACKAGE = Path(__file__).parents[1]


class Source(dict[str, Any]):
    """The names of a module of the package, each made of its definition when it is first asked for.

    Of a class its fields are there, with the descriptions below them, and no method. Names of other packages are
    imported, which of what settings are made of is the standard library alone.

    Args:
        module: such as ``"trainers.ppo"``, below ``torchrl_perf``.

    Raises:
        KeyError: when asked for a name that the module neither defines nor imports.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        path = PACKAGE.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self._definitions: dict[str, ast.stmt] = {}
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            for name in _names_of(statement):
                self._definitions[name] = statement
        self._others: dict[str, Source] = {}

    def __missing__(self, name: str) -> Any:
        statement = self._definitions[name]
        if isinstance(statement, ast.ClassDef):
            self[name] = self._class(statement)
        elif isinstance(statement, ast.ImportFrom):
            self[name] = self._imported(statement, name)
        elif isinstance(statement, ast.Import):
            self[name] = importlib.import_module(name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            self[name] = self._value(statement.value)
        else:
            raise KeyError(name)
        return self[name]

    def _imported(self, statement: ast.ImportFrom, name: str) -> Any:
        original = next(alias.name for alias in statement.names if name in (alias.name, alias.asname))
        module = statement.module or ""
        if not module.startswith("torchrl_perf."):
            return getattr(importlib.import_module(module), original)
        if module not in self._others:
            self._others[module] = Source(module.removeprefix("torchrl_perf."))
        return self._others[module][original]

    def _value(self, expression: ast.expr) -> Any:
        """An expression of the package's own source, with the names of this module."""
        return eval(compile(ast.Expression(expression), "<settings>", "eval"), self)

    def _class(self, statement: ast.ClassDef) -> type:
        """A dataclass with the fields of a class and of those that it inherits from."""
        bases = tuple(self._value(base) for base in statement.bases)
        inherited = [field for base in bases if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)]
        help_of = {field.name: typing.get_args(field.type)[1:] for field in reversed(inherited)}
        body: dict[str, Any] = {"__annotations__": {}, "__doc__": ast.get_docstring(statement)}
        for field, below in itertools.pairwise([*statement.body, None]):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            name, kind = field.target.id, self._value(field.annotation)
            for words in _description(below) or help_of.get(name, ()):
                kind = Annotated[kind, words]
            body["__annotations__"][name] = kind
            if field.value is not None:
                body[name] = self._value(field.value)
        return dataclass(frozen=True)(
            types.new_class(statement.name, bases, exec_body=lambda space: space.update(body))
        )


def _description(below: ast.stmt | None) -> tuple[Any, ...]:
    """What the text below a field is to the parser, or nothing where another statement follows."""
    import tyro

    if not isinstance(below, ast.Expr) or not isinstance(below.value, ast.Constant):
        return ()
    return (tyro.conf.arg(help=" ".join(str(below.value.value).split())),)


def _names_of(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module gives a meaning."""
    match statement:
        case ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name for alias in names]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []
