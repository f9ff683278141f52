"""Functions by import path, ``"package.module:function"``, so that a recipe is plain text."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import math
import os
import re
import symtable
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from devsample.errors import InvalidArgumentError, LoaderError

_FORM = '"package.module:function"'
_BINDS_AT_RUN_TIME = re.compile(
    r"import \*|^def __getattr__|globals\(\)|exec\(|sys\.modules|^\s+global ", re.MULTILINE
)


@dataclass(frozen=True)
class ImportPath:
    """A function or class by its name; it is imported where it is called.

    Args:
        path: ``"package.module:function"``; after the colon there may be dots (``"Class.method"``).
    """

    path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what the path names."""
        return self.resolve()(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.path)

    @property
    def module(self) -> str:
        """The part before the colon."""
        return self.path.partition(":")[0]

    @property
    def names(self) -> list[str]:
        """The parts after the colon."""
        return self.path.partition(":")[2].split(".")

    def resolve(self) -> Callable[..., Any]:
        """The function or class itself.

        Raises:
            LoaderError: it cannot be imported, or is neither; the message has the path.
        """
        try:
            found: Any = importlib.import_module(self.module)
            for name in self.names:
                if isinstance(found, ModuleType) and not hasattr(found, name):
                    with contextlib.suppress(ModuleNotFoundError):
                        importlib.import_module(f"{found.__name__}.{name}")
                found = getattr(found, name)
        except Exception as error:
            raise LoaderError(
                f"loader_spec: {self.path!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not callable(found):
            raise LoaderError(f"loader_spec: {self.path!r} {_no_function(found)}")
        result: Callable[..., Any] = found
        return result

    def check(self, field: str) -> inspect.Signature | None:
        """Find what can be found without importing the module itself (its packages are imported).

        Args:
            field: the field that holds the path, for errors.

        Returns:
            The signature of the function, if it is known without importing anything.

        Raises:
            InvalidArgumentError: the module or the name does not exist, or is no function.
        """
        self._check_form(field)
        loaded = sys.modules.get(self.module)
        spec = self._module_spec(field)
        if loaded is None:
            return self._check_source(field, spec)
        if getattr(loaded.__spec__, "_initializing", False):
            return None  # the spec stands in the module that it names
        found: Any = loaded
        for name in self.names:
            if not hasattr(found, name):
                if isinstance(found, ModuleType) and _exists(f"{found.__name__}.{name}"):
                    return None  # a module that is not imported here
                raise self._missing(field, name, dir(found))
            found = getattr(found, name)
        if not callable(found):
            raise InvalidArgumentError(f"{field}: {self.path!r} {_no_function(found)}")
        return signature_of(found)

    def _check_form(self, field: str) -> None:
        module, colon, names = self.path.partition(":")
        parts = (*module.split("."), *names.split("."))
        if not colon or not all(part.isidentifier() for part in parts):
            raise InvalidArgumentError(_no_path(self.path, field))
        if module == "__main__":
            raise InvalidArgumentError(
                f"{field}: {self.path!r} cannot be imported: in a chain process __main__ is another "
                "module. Pass the function itself, or move it to a module of its own."
            )

    def _module_spec(self, field: str) -> ModuleSpec:
        where = f"{field}: {self.path!r} cannot be imported:"
        try:
            spec = importlib.util.find_spec(self.module)
        except ValueError as error:  # it has no spec
            raise InvalidArgumentError(
                f"{where} the module {self.module!r} was made in memory, and a chain process has no file "
                "to read it from. Pass the function itself."
            ) from error
        except Exception as error:  # a package above it raised
            raise InvalidArgumentError(f"{where} {type(error).__name__}: {error}.") from error
        if spec is None:
            raise InvalidArgumentError(
                f"{where} there is no module {self.module!r}. Chain processes search the folders of this "
                "process's sys.path."
            )
        return spec

    def _check_source(self, field: str, spec: ModuleSpec) -> inspect.Signature | None:
        """Read the module's source for the name, in place of running it."""
        source = _source_of(spec)
        name = self.names[0]
        if source is None:
            return None
        try:
            defined = _defined(source, self.module)
        except (SyntaxError, ValueError) as error:
            raise InvalidArgumentError(
                f"{field}: {self.path!r} cannot be imported: {type(error).__name__}: {error}."
            ) from error
        if name in defined:
            return _signature_in(source, name) if len(self.names) == 1 else None
        if _BINDS_AT_RUN_TIME.search(source) or _exists(f"{self.module}.{name}"):
            return None
        raise self._missing(field, name, defined)

    def _missing(self, field: str, name: str, known: Iterable[str]) -> InvalidArgumentError:
        hint = nearest(name, known)
        return InvalidArgumentError(f"{field}: {self.path!r} does not exist: there is no {name!r}.{hint}")


def signature_of(function: Any) -> inspect.Signature | None:
    """The signature of a function or class; None for builtins that do not tell."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def plain(value: Any, place: str) -> Any:
    """A copy of a value that JSON can hold.

    Args:
        value: None, a bool, an int, a finite float, a str, or lists and dicts of such.
        place: what to call it in an error, e.g. ``"dataset_kwargs['split']"``.

    Raises:
        InvalidArgumentError: naming the place of what is something else.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is list:
        return [plain(one, f"{place}[{index}]") for index, one in enumerate(value)]
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise InvalidArgumentError(f"{place}: the key {key!r} is no string, as JSON needs it.")
        return {key: plain(one, f"{place}[{key!r}]") for key, one in value.items()}
    shown = f"{value!r}" if isinstance(value, float) else f"a {type(value).__name__}"
    raise InvalidArgumentError(
        f"{place}: {shown} is no JSON value. With an import path arguments are plain: None, bool, int, "
        "finite float, str, and lists and dicts (with string keys) of them."
    )


def plain_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of a factory's arguments, each of which JSON can hold."""
    positional = tuple(plain(one, f"dataset_args[{index}]") for index, one in enumerate(args))
    keywords: dict[str, Any] = plain(dict(kwargs), "dataset_kwargs")
    return positional, keywords


def path_of(function: Any) -> str | None:
    """The import path that leads to ``function``, if there is one."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    path = ImportPath(f"{module}:{name}")
    try:
        path.check("")
        return path.path if path.resolve() is function else None
    except (InvalidArgumentError, LoaderError):
        return None


def nearest(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the most similar known name, or nothing.

    >>> nearest("batchsize", ["batch_size", "num_samples"])
    " Did you mean 'batch_size'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _no_path(text: str, field: str) -> str:
    if field != "dataset":
        return f"{field}: expected a function or its import path {_FORM}, got {text!r}."
    named = (
        f"{field}: expected a data set, a function that makes one, or its import path {_FORM}, got {text!r}."
    )
    is_file = os.sep in text or "/" in text or os.path.exists(text)
    return named + (
        " To read a file, write a function that opens it and returns a data set." if is_file else ""
    )


def _no_function(found: Any) -> str:
    return (
        f"is a {type(found).__name__}, not a function or class. Name a function that returns it, "
        "or pass the object itself."
    )


def _source_of(spec: ModuleSpec) -> str | None:
    try:
        source = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
    except Exception:  # no Python file: an extension module, a namespace package, ...
        return None
    return source if isinstance(source, str) else None


def _defined(source: str, module: str) -> set[str]:
    """Names that the top level of a module binds."""
    symbols = symtable.symtable(source, module, "exec").get_symbols()
    return {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}


def _signature_in(source: str, name: str) -> inspect.Signature | None:
    """The signature of an undecorated function of the top level, from the text of its ``def``."""
    tree = ast.parse(source)
    named = [one for one in ast.walk(tree) if getattr(one, "name", None) == name]
    if len(named) != 1 or named[0] not in tree.body or not isinstance(named[0], ast.FunctionDef):
        return None
    if named[0].decorator_list:
        return None
    arguments = named[0].args
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [None if one is None else ast.Constant(...) for one in arguments.kw_defaults]
    lambda_ = ast.Expression(ast.Lambda(arguments, ast.Constant(None)))
    code = compile(ast.fix_missing_locations(lambda_), "<signature>", "eval")
    return signature_of(eval(code, {}))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # a package above it is no package, or raises
        return False
