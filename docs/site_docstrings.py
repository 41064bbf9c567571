"""How does a docstring of this project, plain prose, become a page?

griffe, which reads the sources without importing them, calls `ProseDocstrings` (mkdocs.yml names this file). Our
docstrings describe an argument or a field as `name: text` or `name, name: text`; only names that the object has are
taken for that. Each such entry becomes an item of a list; it ends with the next one, with a line about errors, or with
its paragraph.
"""

from __future__ import annotations

import re

from griffe import Extension, ParameterKind

ERRORS = re.compile(r"(?:Raises|[A-Z]\w+Error)\b")
ANY = r"[a-z]\w{3,}"  # of an object that takes **arguments, every longer word may be one


def as_list(paragraph: str, one: str) -> str:
    """The paragraph with its entries for names of this pattern as items of a list; indented ones are code."""
    if paragraph.startswith("    "):
        return paragraph
    entry = re.compile(rf"((?:{one})(?:,\s(?:{one}))*):\s+(?=\S)")
    sentence = re.compile(rf"(?<=[.;])\s+(?=Raises\s|(?:{one})(?:,\s(?:{one}))*:\s+\S)")
    prose, items, after = [], [], []
    for part in (part for line in paragraph.splitlines() for part in sentence.split(line.strip())):
        if after or (items and ERRORS.match(part)):
            after.append(part)
        elif match := entry.match(part):
            named = ", ".join(f"`{name}`" for name in re.split(r",\s", match[1]))
            items.append(f"- {named}: {part[match.end():]}")
        elif items:
            items[-1] += f"\n    {part}"
        else:
            prose.append(part)
    return "\n\n".join("\n".join(lines) for lines in (prose, items, after) if lines)


def rewrite(obj, parameters, fields=()) -> None:
    """The docstring of a function or class, which has these parameters and fields, as a page shows it."""
    names = {parameter.name.lstrip("*") for parameter in parameters} | {*fields}
    if obj.docstring and names:
        open_ended = any(parameter.kind is ParameterKind.var_keyword for parameter in parameters)
        one = "|".join([*sorted(names, key=len, reverse=True), *([ANY] if open_ended else [])])
        first, *others = re.split(r"\n\s*\n", obj.docstring.value)
        obj.docstring.value = "\n\n".join([first, *(as_list(other, one) for other in others)])


class ProseDocstrings(Extension):
    """What griffe calls: for a function as it is read, for a class once its members are."""

    def on_function_instance(self, *, func, **_):
        rewrite(func, func.parameters)

    def on_class_members(self, *, cls, **_):
        made = cls.members.get("__init__")
        rewrite(cls, made.parameters if made is not None and made.is_function else (), cls.members)
