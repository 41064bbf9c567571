"""How is a malformed input made of a good one? A few seeded changes of bytes, or of what a JSON text says."""

from __future__ import annotations

import io
import json
import random
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import tomllib

_NUMBERS = (0, 1, 7, 127, 128, 255, 256, 65535, 65536, *(2**bits - one for bits in (31, 32, 63, 64) for one in (0, 1)))
_VALUES = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 1e308, 0.5, "", "0", "x" * 300,
    "\ud800", "\x00", "../..", [], [[]], {}, {"": {}}, [0] * 65, [None], ["x"], {"x": 1},
)  # fmt: skip
_TEXTS = (
    b"NaN", b"Infinity", b"-", b"1e999", b"{", b"[" * 2000, b'{"a":' * 2000, b"\xff", b"\x00", b'"', b",", b"9" * 5000,
)  # fmt: skip

Change = Callable[[bytearray, random.Random], None]


def _flip(data: bytearray, chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(data: bytearray, chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _number(data: bytearray, chance: random.Random) -> None:
    """A little-endian number of four or eight bytes, in place."""
    size, at = chance.choice((4, 8)), chance.randrange(len(data) + 1)
    data[at : at + size] = (chance.choice(_NUMBERS) % 256**size).to_bytes(size, "little")


def _cut(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.choice((1, 2, 8, 64, len(data)))]


def _double(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    piece = data[at : at + chance.randrange(1, 65)]
    data[at:at] = piece * chance.choice((1, 1, 1, 40))


def _insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice(_TEXTS) if chance.random() < 0.5 else chance.randbytes(chance.randrange(1, 9))


def _swap(data: bytearray, chance: random.Random) -> None:
    first, second = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    size = chance.randrange(1, 17)
    data[first : first + size], data[second : second + size] = (
        data[second : second + size], data[first : first + size],
    )  # fmt: skip


CHANGES: tuple[Change, ...] = (_flip, _flip, _set, _number, _cut, _double, _insert, _swap)


def changed_bytes(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """One to six changes; now and then the beginning of one input with the end of another."""
    found = bytearray(data)
    if chance.random() < 0.1:
        other = chance.choice(others)
        found[chance.randrange(len(found) + 1) :] = other[chance.randrange(len(other) + 1) :]
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        chance.choice(CHANGES)(found, chance)
    return bytes(found)


def changed_json(value: object, chance: random.Random) -> object:
    """The value with one of its parts removed, doubled, renamed, moved or replaced by an odd one."""
    if chance.random() < 0.1 or not isinstance(value, dict | list) or not value:
        return chance.choice(_VALUES)
    if isinstance(value, list):
        at, how = chance.randrange(len(value)), chance.random()
        if how < 0.1:
            return value[:at] + value[at + 1 :]
        if how < 0.2:
            return value[: at + 1] * chance.choice((1, 2))
        return [*value[:at], changed_json(value[at], chance), *value[at + 1 :]]
    key, how = chance.choice(list(value)), chance.random()
    if how < 0.1:
        return {name: part for name, part in value.items() if name != key}
    if how < 0.2:
        return value | {chance.choice((*value, "", "other", "0")): value[key]}
    return value | {key: changed_json(value[key], chance)}


def changed_text(text: bytes, chance: random.Random) -> bytes | None:
    """A JSON text, or one of its lines, that says something else; None where it is no JSON."""
    if (value := parsed(text)) is not None:
        return _WRITERS[chance.random() < 0.9](changed_values(value[0], chance))
    lines = text.split(b"\n")
    at = int(chance.random() * len(lines))
    if len(lines) < 2 or (value := parsed(lines[at])) is None:
        return None
    lines[at] = _WRITERS[chance.random() < 0.9](changed_values(value[0], chance))
    return b"\n".join(lines)


def changed_values(value: object, chance: random.Random) -> object:
    """One to three changes."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        value = changed_json(value, chance)
    return value


@lru_cache(4096)
def parsed(text: bytes) -> tuple[Any] | None:
    """What a JSON text says, in a tuple; None where it is none. Nobody changes it: changes are made of copies."""
    try:
        return (json.loads(text),)
    except (ValueError, RecursionError):
        return None


def _writer(ensure_ascii: bool) -> Callable[[object], bytes]:
    write = json.JSONEncoder(ensure_ascii=ensure_ascii).encode
    return lambda value: write(value).encode(errors="surrogatepass")


_WRITERS = _writer(False), _writer(True)


def changed_header(data: bytes, chance: random.Random) -> bytes | None:
    """A safetensors file whose header says something else, of its tensors or in the JSON texts of its metadata."""
    length = int.from_bytes(data[:8], "little")
    if (value := parsed(data[8 : 8 + length])) is None or not isinstance(value[0], dict):
        return None
    header, told = value[0], value[0].get("__metadata__")
    if isinstance(told, dict) and told and chance.random() < 0.6:
        key = chance.choice(list(told))
        if isinstance(told[key], str) and (text := changed_text(told[key].encode(errors="surrogatepass"), chance)):
            header = header | {"__metadata__": told | {key: text.decode(errors="surrogateescape")}}
        else:
            header = header | {"__metadata__": changed_json(told, chance)}
    else:
        header = changed_values(header, chance)
    text = _WRITERS[1](header)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@lru_cache(256)
def _unzipped(data: bytes) -> tuple[tuple[str, bytes], ...]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return tuple((one.filename, archive.read(one)) for one in archive.infolist())
    except Exception:  # a pool has damaged ones, too
        return ()


def changed_zip(data: bytes, chance: random.Random) -> bytes | None:
    """A zip of torch.save of which a part was changed, most often the pickle; its checksums fit. None for another
    file."""
    if not (parts := list(_unzipped(data))):
        return None
    at = chance.randrange(len(parts))
    if chance.random() < 0.8:
        at = next((place for place, (name, _) in enumerate(parts) if name.endswith(".pkl")), at)
    name, content = parts[at]
    how = chance.random()
    if how < 0.9:
        parts[at] = name, changed_bytes(content, [own for _, own in parts], chance)
    elif how < 0.95:
        parts[at] = chance.choice(("data.pkl", "archive/x.pkl", "archive/data/0", "../a")), content
    else:
        del parts[at]
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        warnings.simplefilter("ignore")  # two parts of one name
        for own, content in parts:
            archive.writestr(zipfile.ZipInfo(own), content)
    return file.getvalue()


def changed_toml(text: bytes, chance: random.Random) -> bytes | None:
    """A TOML text that says something else; None where it is none."""
    try:
        value = tomllib.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    value = changed_values(value, chance)
    if not isinstance(value, dict):
        return _toml(value).encode(errors="surrogatepass")
    return "".join(f"{json.dumps(key)} = {_toml(one)}\n" for key, one in value.items()).encode(errors="replace")


def _toml(value: object) -> str:
    """A value on one line; None, which TOML does not have, as JSON's."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, default=str)
