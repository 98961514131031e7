"""Masks of vectors of whole numbers modulo 2^32 or 2^64, which cancel in a sum.

K. Bonawitz et al.: Practical secure aggregation for privacy-preserving machine learning, CCS 2017,
section 4. Client u sends

    y_u = x_u + PRG(b_u) + sum over neighbours v > u of PRG(s_uv) - sum over v < u of PRG(s_uv)

where b_u is its own fresh seed, and s_uv a secret that u and v agree on. In a sum over clients the
masks of pairs cancel, exactly, since words wrap around; the rest are masks of the b_u, and of pairs
with those who were lost. The PRG is AES-256 in counter mode, whose every key is used once.

Vectors are masked in blocks that stay in the processor's cache, with all masks of a block at once,
so that a million values need little memory besides their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

KEY_BYTES = 32
_BLOCK = 1 << 16  # bytes; the words do not depend on it
_SPARE = 15  # bytes that a cipher wants behind what it writes


def word_bits(most: int, clients: int) -> int:
    """Return the bits of a word that holds the sum of all clients: 32, or 64.

    Args:
        most: the largest magnitude of a value.

    Raises:
        ValueError: if 64 are not enough.
    """
    for bits in (32, 64):
        if most * clients < 1 << bits - 1:
            return bits
    raise ValueError(f"values up to {most} of {clients} clients")


def to_words(values: np.ndarray, most: int, bits: int) -> np.ndarray:
    """Return a copy of whole numbers as words.

    Args:
        values: (size,), of a type of integers, each at most `most` in magnitude.
        bits: 32 or 64.

    Returns:
        (size,), uint32 or uint64 in the order of bytes of all messages, little-endian.

    Raises:
        ValueError: if a value is no integer or too large.
    """
    if values.ndim != 1 or values.dtype.kind != "i":
        raise ValueError(f"values of type {values.dtype} and shape {values.shape}")
    if len(values) and not -most <= int(values.min()) <= int(values.max()) <= most:
        raise ValueError(f"a value above {most}")
    return values.astype(f"<i{bits // 8}").view(word_type(bits))


def to_values(words: np.ndarray) -> np.ndarray:
    """Return the whole numbers, negative ones too, that words stand for, as int64."""
    return words.view(f"<i{words.itemsize}").astype(np.int64)


def word_type(bits: int) -> np.dtype[Any]:
    """Return the type of a word."""
    return np.dtype(f"<u{bits // 8}")


def apply(words: np.ndarray, plus: Sequence[bytes], minus: Sequence[bytes] = ()) -> None:
    """Add and subtract masks, in place.

    Args:
        words: (size,), uint32 or uint64, contiguous.
        plus, minus: keys of 32 bytes, each of one mask.
    """
    added, subtracted = [_cipher(key) for key in plus], [_cipher(key) for key in minus]
    zeros, buffer = bytes(_BLOCK), bytearray(_BLOCK + _SPARE)
    drawn = np.frombuffer(buffer, words.dtype, _BLOCK // words.itemsize)
    for start in range(0, len(words), len(drawn)):
        part = words[start : start + len(drawn)]
        mask = drawn[: len(part)]
        # What is encrypted is zero, so that the outcome is the stream itself.
        clear = zeros if len(part) == len(drawn) else bytes(part.nbytes)
        for cipher in added:
            cipher.update_into(clear, buffer)
            np.add(part, mask, out=part)
        for cipher in subtracted:
            cipher.update_into(clear, buffer)
            np.subtract(part, mask, out=part)


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    # The key is of this one mask, so that the counter may begin at 0.
    return Cipher(AES(key), CTR(bytes(16))).encryptor()


def derive(secret: bytes, info: bytes) -> bytes:
    """Derive a key of 32 bytes from a secret (HKDF-SHA256, RFC 5869).

    Args:
        info: what the key is for, see `fedtools.privacy.secagg.session.Session.info`.
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, None, info).derive(secret)
