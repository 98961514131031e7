"""Damage to one file as caused by disks, editors, scripts and strangers."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

TOKENS = [
    *("../x", "/dev/zero", "", " ", "\t", "\0", "\r", "nan", "inf", "-1", "0", "1e400", "1e-400"),
    *("9" * 25, "9" * 400, "é", "\u2028", "\ufeff", "true", "[", "{", "#", "|", "a" * 300, "1_0"),
]
VALUES: list[Any] = [
    *(True, None, [], ["a"], [1], {}, {"a": 1}, 0, 3, -1, 0.5, 10**30, -(10**30), 1e308, 1e-308),
    *(float("nan"), float("inf"), "", "x", "../x", "/dev/zero", "1", "a\0b", "é" * 300, [[[[[]]]]]),
]
NUMBERS = [
    *(float("nan"), float("inf"), -float("inf"), -40.0, -1.0, 0.0, 0.1, 1e-300, 1e38, 1e300),
    *(2.0**40, 1.7e308),
]
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}
SHAPES: list[Any] = [[], [0], [-1], [1 << 62, 4], [1 << 70], [10**4000], [1.5], ["1"], None, [[1]]]
# YAML that is small as text, and large or endless once parsed.
BOMBS = [
    "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "a: &a [*a]\n",
    "a: " + "[" * 3000 + "]" * 3000 + "\n",
    "a:\n" + "".join(" " * i + "a:\n" for i in range(1, 1500)),
    "a: !!bool x\n",
    "a: !!python/object/apply:os.system [false]\n",
    "? [a]\n: b\n",
    # Integers: decimal, hexadecimal, octal, binary, and in base 60; some are slow to print.
    *(f"a: {number}\n" for number in ("9" * 5000, "9" * 1_000_000, "0x" + "f" * 1_000_000)),
    *(f"a: {number}\n" for number in ("0" + "7" * 1_000_000, "0b" + "1" * 1_000_000)),
    *(f"a: {number}\n" for number in ("1" + ":59" * 300_000, "-" + "1_" * 500_000 + "1")),
    "rounds: 1000000000\n",
    f"{'9' * 5000}: a\n",
]


def mutate(path: Path, dice: random.Random, others: list[Path]) -> str:
    """Damage a file, and return a description.

    Args:
        path: the file.
        dice: source of random choices.
        others: files whose content may replace it.
    """
    ways: list[Callable[[Path, random.Random], str]] = [_bytes, _bytes, _lines, _lines, _token]
    ways += [_token, _replace, lambda path, dice: _other(path, dice, others)]
    if path.suffix == ".yaml":
        ways += [_option] * 12 + [_bomb]
    if path.suffix == ".safetensors":
        ways += [_tensor] * 12
    return dice.choice(ways)(path, dice)


def _put(path: Path, content: bytes) -> None:
    mode = path.stat().st_mode
    path.unlink()
    path.write_bytes(content)
    path.chmod(mode)  # A key that other users can read would be refused for that.


def _bytes(path: Path, dice: random.Random) -> str:
    content = bytearray(path.read_bytes())
    way = dice.choice(["flip", "flip", "header", "cut", "empty", "more", "latin"])
    place = dice.randrange(len(content) + 1)
    if way == "header":
        place = min(place, dice.randrange(120))
    if way in ("flip", "header"):
        for _ in range(dice.choice([1, 1, 8]) if content else 0):
            content[(place + dice.randrange(16)) % len(content)] ^= 1 << dice.randrange(8)
    elif way == "cut":
        del content[place:]
    elif way == "empty":
        content.clear()
    elif way == "more":
        content += dice.randbytes(dice.choice([1, 100]))
    else:
        content[place:place] = b"\xff\xfe"
    _put(path, bytes(content))
    return f"{way} at {place}"


def _lines(path: Path, dice: random.Random) -> str:
    lines = path.read_bytes().splitlines(keepends=True) or [b""]
    one, two = dice.randrange(len(lines)), dice.randrange(len(lines))
    way = dice.choice(["double", "remove", "swap", "comment", "join", "no end", "CRLF"])
    if way == "double":
        lines.insert(one, lines[one])
    elif way == "remove":
        del lines[one]
    elif way == "swap":
        lines[one], lines[two] = lines[two], lines[one]
    elif way == "comment":
        lines[one] = b"#" + lines[one]
    elif way == "CRLF":
        lines[one] = lines[one].rstrip(b"\n") + b"\r\n"
    else:
        lines[one if way == "join" else -1] = lines[one if way == "join" else -1].rstrip(b"\n")
    _put(path, b"".join(lines))
    return f"{way}, line {one + 1}"


def _token(path: Path, dice: random.Random) -> str:
    """Replace or remove a word of the file."""
    content = path.read_bytes()
    separators = [b" ", b"\t", b"\n", b":", b"/", b",", b"-"]
    separator = dice.choice([mark for mark in separators if mark in content] or [b" "])
    words = content.split(separator)
    place, token = dice.randrange(len(words)), dice.choice(TOKENS)
    words[place] = token.encode()
    _put(path, separator.join(words))
    return f"word {place} is {token[:12]!r}"


def _replace(path: Path, dice: random.Random) -> str:
    """Put something other than a file in its place."""
    way = dice.choice(["nothing", "folder", "FIFO", "zeros", "dangling", "loop", "socket"])
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "FIFO":
        os.mkfifo(path)
    elif way == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # A socket's whole path may not be longer than 107 bytes.
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    elif way != "nothing":
        target = {"zeros": "/dev/zero", "dangling": "none", "loop": path.name}[way]
        path.symlink_to(target)
    return way


def _other(path: Path, dice: random.Random, others: list[Path]) -> str:
    """Replace the content by another file's."""
    other = dice.choice(others)
    if other != path:
        path.unlink()
        shutil.copyfile(other, path)
    return f"the content of {other.name}"


def _option(path: Path, dice: random.Random) -> str:
    """Change the value or name of an option of YAML, or remove it."""
    content = yaml.safe_load(path.read_text())
    places = list(_places(content))
    if not places:
        return "no option"
    keys = dice.choice(places)
    parent = content
    for key in keys[:-1]:
        parent = parent[key]
    name, way = ".".join(keys), dice.choice(["value"] * 6 + ["name", "remove", "more"])
    if way == "value":
        value = dice.choice(VALUES)
        parent[keys[-1]] = value
        way = f"is {str(value)[:20]!r}"
    elif way == "more":
        parent["strange"] = dice.choice(VALUES)
    else:
        value = parent.pop(keys[-1])
        if way == "name":
            parent[f"{keys[-1]}x"] = value
    _put(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())
    return f"option {name}: {way}"


def _places(content: Any) -> list[tuple[str, ...]]:
    """Return the keys of all options, each with the keys that lead to it."""
    if not isinstance(content, dict):
        return []
    return [(key, *rest) for key, value in content.items() for rest in [(), *_places(value)]]


def _tensor(path: Path, dice: random.Random) -> str:
    """Change numbers of a tensor, or its header."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return "no tensor"
    name = dice.choice(names)
    one = header[name]
    begin, end = one["data_offsets"]
    dtype = DTYPES.get(one["dtype"])
    way = dice.choice(["numbers"] * 6 + ["shape", "dtype", "data_offsets", "name", "remove"])
    if way == "numbers" and dtype and end > begin:
        with np.errstate(all="ignore"):
            number = np.array(dice.choice(NUMBERS)).astype(dtype).tobytes()
        every = dice.random() < 0.3
        for place in range(begin, end, len(number)) if every else [begin]:
            data[place : place + len(number)] = number
        way = f"{'all' if every else 'the first'} {number.hex()}"
    elif way == "shape":
        one["shape"] = dice.choice([*SHAPES, one["shape"][::-1], [*one["shape"], 1]])
    elif way == "dtype":
        one["dtype"] = dice.choice([*DTYPES, "F8_E4M3", "X", 3, None])
    elif way == "data_offsets":
        one["data_offsets"] = dice.choice([[end, begin], [begin, 1 << 70], [-1, end], [], None])
    elif way == "name":
        header[dice.choice(["x", "", "a\0b", "é" * 300, "../x"])] = header.pop(name)
    else:
        del header[name]
    text = json.dumps(header).encode()
    _put(path, len(text).to_bytes(8, "little") + text + data)
    return f"tensor {name}: {way}"


def _bomb(path: Path, dice: random.Random) -> str:
    number = dice.randrange(len(BOMBS))
    old = b"" if dice.random() < 0.3 else path.read_bytes()
    _put(path, old + BOMBS[number].encode())
    return f"bomb {number}"
