"""Statements of the server and of sites, signed with Ed25519 keys that each has made for itself.

    EXP/roster.tsv        site and public key (64 hexadecimal digits), "server" among the sites;
                          one of the fixed files
    NAME, NAME.sig        a statement in YAML, with the SHA-256 of the files that it comes with, and
                          64 bytes: the signature over the bytes of the statement

OpenSSL reads the private keys (PKCS #8 in PEM) and checks the signatures. Without a roster,
statements have no signatures, and whoever carries them is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedtools.core.atomic import atomic_write, remove, sha256
from fedtools.core.config import from_mapping, parse_yaml, write_yaml
from fedtools.core.errors import UserError
from fedtools.core.locks import lock
from fedtools.core.secret_files import read_secret, write_secret
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.core.text_files import decode
from fedtools.core.untrusted import open_received
from fedtools.data.datadir import byte_order

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

T = TypeVar("T", bound="DataclassInstance")

FILE = "roster.tsv"
COLUMNS = ("site", "key")
# The row of the server's key; no site of a roster has this name.
SERVER = "server"
_SIGNATURE_BYTES = 64
# Of a statement without files, and of each of its files: a name, a sum, and what YAML adds.
_STATEMENT_BYTES, _FILE_BYTES = 1 << 14, 512


def make_key(path: Path) -> str:
    """Create a private key unless there is one, and return its public key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock(path.parent, path.name, wait=True):
            if not path.exists():
                pem = Ed25519PrivateKey.generate().private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
                write_secret(path, pem)
    return public_of(read_key(path))


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
        UserError: if it is missing, no Ed25519 key, encrypted, or accessible to other users.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = read_secret(path, "key of a site or the server", "make one with fedtools site-key")
    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        # The message omits the content, which may be another secret.
        remedy = "make one with fedtools site-key"
        raise UserError("not an Ed25519 key without password, in PEM", path=path, remedy=remedy)
    return key


def public_of(key: Ed25519PrivateKey) -> str:
    """Return the public key of a private one, as it stands in a roster."""
    return key.public_key().public_bytes_raw().hex()


def read_roster(path: Path, sites: Iterable[str] | None = None) -> dict[str, str]:
    """Read the public key of the server and of each site, in C order.

    Args:
        path: the table.
        sites: the sites that it must have, besides the server; None takes any.

    Raises:
        UserError: if a row is missing, duplicated or of no site, or two rows have the same key.
    """
    wanted = None if sites is None else {SERVER, *sites}
    found = read_public_keys(path, COLUMNS, wanted, distinct=True)
    for name in byte_order((wanted or {SERVER}) - found.keys()):
        remedy = "add what fedtools site-key prints there"
        raise UserError(f"no key of {name}", path=path, remedy=remedy)
    return {name: found[name] for name in byte_order(found)}


def read_public_keys(
    path: Path, columns: Sequence[str], wanted: Collection[str] | None, distinct: bool
) -> dict[str, str]:
    """Read a table of public keys, in the order of its rows.

    Args:
        columns: what the keys are of, such as "site", and "key".
        wanted: the names that may be there; None for any.
        distinct: whether no two rows may have the same key.

    Raises:
        UserError: naming the line of the first row that is wrong.
    """
    found, keys = dict[str, str](), set[str]()
    for line, row in enumerate(read_tsv(path, columns), 2):
        name, key, problem = row[columns[0]], row["key"], ""
        if wanted is not None and name not in wanted:
            problem = f"{name!r} is no {columns[0]} of this experiment"
        elif name in found:
            problem = f"{name} came before"
        elif not re.fullmatch("[0-9a-f]{64}", key):
            problem = f"the key of {name} is not one of 64 hexadecimal digits"
        elif distinct and key in keys:
            problem = f"{name} has the key of another"
        if problem:
            raise UserError(problem, path=path, line=line)
        found[name] = key
        keys.add(key)
    return found


def write_roster(path: Path, roster: Mapping[str, str]) -> None:
    """Write a roster, whose SHA-256 is its fingerprint."""
    write_tsv(path, COLUMNS, [{"site": site, "key": key} for site, key in roster.items()])


def key_for(path: Path | None, roster: Mapping[str, str], name: str) -> Ed25519PrivateKey | None:
    """Return the private key of the server or of a site; None without a roster.

    Raises:
        UserError: if a key is needed and not given, or given and not needed, or is another's.
    """
    if path is None:
        if roster:
            problem = "the experiment has a roster of keys, so that this must be signed"
            raise UserError(problem, remedy=f"give the key of {name}: --key FILE")
        return None
    if not roster:
        remedy = "leave --key out, or begin the experiment with --roster"
        raise UserError("the experiment has no roster of keys", path=path, remedy=remedy)
    key = read_key(path)
    if roster.get(name) != public_of(key):
        raise UserError(f"not the key of {name} in the experiment's roster", path=path)
    return key


def sign(path: Path, key: Ed25519PrivateKey | None) -> None:
    """Write the signature of a file beside it; none, and remove an old one, without a key."""
    where = signature_of(path)
    if key is None:
        remove(where)
        return
    with atomic_write(where, "wb") as file:
        file.write(key.sign(path.read_bytes()))


def signature_of(path: Path) -> Path:
    """Return the path of the signature of a file."""
    return path.with_name(f"{path.name}.sig")


def read_signed(path: Path, name: str, roster: Mapping[str, str], files: int) -> bytes:
    """Read a received file, whose signature must be that of the server or of a site.

    Args:
        path: the file.
        name: who has signed it: a name in the roster.
        roster: names and public keys; without any, signatures are not read.
        files: the largest number of files that a statement names.

    Raises:
        UserError: if the file or its signature is missing or too long, or not by `name`.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    with open_received(path, _STATEMENT_BYTES + _FILE_BYTES * files) as file:
        content = file.read()
    if roster:
        if name not in roster:
            raise UserError(f"{name!r} has no key in the experiment's roster", path=path)
        where = signature_of(path)
        with open_received(where, _SIGNATURE_BYTES) as file:
            signature = file.read()
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(roster[name]))
        try:
            public.verify(signature, content)
        except InvalidSignature:
            raise UserError(f"not signed by {name}", path=path) from None
    return content


def write_statement(
    path: Path, fields: Mapping[str, Any], files: Iterable[Path], key: Ed25519PrivateKey | None
) -> None:
    """Write a statement with the sums of its files, and its signature."""
    write_yaml(path, {**fields, "files": {file.name: sha256(file) for file in sorted(files)}})
    sign(path, key)


def read_statement(
    kind: type[T], path: Path, name: str, roster: Mapping[str, str], files: int
) -> T:
    """Read a statement; arguments and errors as in `read_signed`, and of its fields."""
    content = decode(read_signed(path, name, roster, files), path)
    return from_mapping(kind, parse_yaml(content, path), path)
