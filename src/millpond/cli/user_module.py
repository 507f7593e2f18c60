"""Import a module of the user, and the pond in it. An error in it is shown as it is, with its file and line."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import millpond
from millpond.errors import InvalidOption
from millpond.pond import Millpond

_LIBRARIES = tuple(
    {*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), *millpond.__path__}
)


def import_user_module(name: str) -> ModuleType:
    """Import a module by its name, from the current folder too."""
    if name.endswith(".py") or "/" in name:
        raise InvalidOption(f"{name!r} is a file; give the name of a module as in an import: shop.orders:pond")
    if not all(name.split(".")):
        raise InvalidOption(f"{name!r} is not the name of a module, such as shop.orders")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(f"{e.name}.")):
            raise InvalidOption(
                f"there is no module {e.name!r}, neither in {Path.cwd()} nor among the installed packages"
            ) from None
        raise _failed(name, e) from e
    except Exception as e:
        raise _failed(name, e) from e


def load_pond(target: str) -> Millpond:
    """Import the pond at `module:name` from the current folder; the default name is `pond`."""
    module_name, _, path = target.partition(":")
    path = path or "pond"
    module = import_user_module(module_name)
    pond: Any = module
    for part in path.split("."):
        try:
            pond = getattr(pond, part)
        except AttributeError:
            there = ", ".join(sorted(name for name, value in vars(module).items() if isinstance(value, Millpond)))
            raise InvalidOption(
                f"the module {module_name!r} has no {path!r}"
                + (f"; its ponds are: {there}" if there else "; it contains no Millpond")
            ) from None
    if not isinstance(pond, Millpond):
        raise InvalidOption(f"{target} is not a Millpond but a {type(pond).__name__}")
    return pond


def _failed(name: str, error: Exception) -> InvalidOption:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return InvalidOption(f"importing {name!r} failed{_place(error)}: {type(error).__name__}: {text}")


def _place(error: Exception) -> str:
    """File and line of the user's code, and not those of a library that it called."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f" at {_short(error.filename)}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if not own:
        return ""
    return f" at {_short(own[-1].filename)}, line {own[-1].lineno}"


def _short(path: str) -> str:
    file = Path(path)
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else path
