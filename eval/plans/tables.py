"""What does a TOML plan ask for, and is all that it names there? Said before anything is computed.

`read_toml` and `read_table` (a TOML table into a dataclass) know no program; systems and prompts, which most plans
name, are in eval/plans/systems.py, and what a program's own plan consists of stands in its folder.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import tomllib

_NOUNS = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list",
          dict: "a table", type(None): "nothing"}
T = TypeVar("T")


class PlanError(ValueError):
    """One sentence: the file, the table and the key that are wrong, and what would be right."""


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables; PlanError where there is no such file, or where it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError; thousands of brackets
        raise PlanError(f"{path} is no TOML: {error}") from error


def read_table(kind: type[T], table: Any, where: str) -> T:
    """The table as this dataclass, whose fields are its keys; PlanError for unknown, missing and mistyped ones."""
    if not isinstance(table, dict):
        raise PlanError(f"{where} is {table!r}, it must be a table")
    hints = typing.get_type_hints(kind)
    keys = [entry.name for entry in dataclasses.fields(kind)]
    unknown = [key for key in table if key not in keys]
    if unknown:
        raise PlanError(f"{where}: unknown key {unknown[0]!r}; it may have {', '.join(keys)}")
    for entry in dataclasses.fields(kind):
        needed = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if needed and entry.name not in table:
            raise PlanError(f"{where}: no key {entry.name!r}, which it must have")
    for key, value in table.items():
        if not fits(value, hints[key]):
            raise PlanError(f"{where}: {key} is {value!r}, it must be {_noun(hints[key])}")
    return kind(**table)


def read_tables(kind: type[T], plan: dict[str, Any], key: str, path: Path) -> list[T]:
    """The tables `[[key]]` of a plan, which may be none; their `name`s, where they have any, must differ."""
    tables = plan.get(key, [])
    if not isinstance(tables, list):
        raise PlanError(f"{path}: {key} must be a list of tables, [[{key}]]")
    found = [read_table(kind, table, f"{path}: [[{key}]] {number}") for number, table in enumerate(tables, 1)]
    names = [getattr(one, "name", number) for number, one in enumerate(found)]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"{path}: {names.count(name)} tables [[{key}]] are named {name!r}: rename all but one")
        if isinstance(name, str):
            check_name(name, f"{path}: [[{key}]]")
    return found


def check_name(name: str, where: str) -> None:
    """PlanError for a name that a file could not have everywhere."""
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise PlanError(f"{where}: name is {name!r}: letters, digits and ._+- only, as it becomes part of file names")


def fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value is of this type: unions, list[...], and the plain ones (an integer is a number, too)."""
    if isinstance(hint, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(fits(entry, typing.get_args(hint)[0]) for entry in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else typing.get_origin(hint) or hint)


def _noun(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_noun(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is list:
        return f"a list, each entry {_noun(typing.get_args(hint)[0])}"
    return _NOUNS[typing.get_origin(hint) or hint]
