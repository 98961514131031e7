"""Discrete Laplace noise from a keyed stream, by integer arithmetic alone.

The low bits of floating-point Laplace noise reveal the value it was added to (Mironov, "On
significance of the least significant bits for differential privacy", CCS 2012). So counts are whole
multiples of a grid (see `plan`), and the noise X is a whole number of steps with P(X = x)
proportional to exp(-|x| / scale): the discrete Laplace or two-sided geometric distribution (Ghosh
et al., 2009; Canonne, Kamath and Steinke, 2020).

Drawing a value. X is 0 with probability (1 - q) / (1 + q), where q = exp(-1 / scale); otherwise it
is a fair sign times 1 + G, where G is geometric, P(G = g) = (1 - q) q^g. As q^g is the product of
q^(2^j) over the binary digits j of g that are set, the digits of G are independent, and digit j is
set with probability 1 / (1 + exp(2^j / scale)). So a value is a few dozen independent biased coins,
without rejection or rounding.

Tossing a coin. A uniform number of 136 bits is compared with the coin's probability, computed with
80 decimal digits and truncated to a binary fraction of 136 bits. One byte decides 255 of 256
tosses; the other 16 bytes are drawn only if it ties. The error of a coin's probability is below
2^-136, so the total variation distance of a value's distribution from the exact one is below 2^-129
(fewer than 80 coins, including the higher digits, which are never set), and a release of 2^20 words
adds less than 2^-108 to delta. The stream is a pseudorandom function that no known attack
distinguishes from random in fewer than 2^128 steps. The ledger's delta of 0 neglects both.

The time to draw a value may depend on the noise. No attacker can measure it, since there is no
service that responds to requests.
"""

from __future__ import annotations

import hashlib
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np

_CHUNK = 1 << 15  # values drawn at once; changing it would change the noise
_TAIL = 16  # bytes of a coin after the first
_BITS = 8 * (1 + _TAIL)
_LARGEST = Fraction(1 << 48)
_PRECISE = Context(prec=80)


class Stream:
    """An unlimited stream of pseudorandom bytes: SHAKE-256 of a secret, a label and a number.

    SHAKE-256 (FIPS 202) keyed by a prefix is a pseudorandom function in Python's standard library.
    numpy's generators are not used: PCG64 and the Mersenne Twister can be predicted from their
    output, and Philox, although counter-based with a 128-bit key, is a weakened cipher that was
    tested for its statistics only, not against attacks on the key.

    Args:
        secret: 32 bytes.
    """

    def __init__(self, secret: bytes):
        if len(secret) != 32:
            raise ValueError(f"a secret of {len(secret)} bytes")
        self._secret = secret

    def take(self, label: bytes, number: int, size: int) -> bytes:
        """Return `size` bytes that depend only on a 4-byte label and a number below 2^64."""
        if len(label) != 4:
            raise ValueError(f"label {label!r}")
        name = self._secret + label + number.to_bytes(8, "big")
        return hashlib.shake_256(name).digest(size)


def discrete_laplace(stream: Stream, scale: Fraction, size: int) -> np.ndarray:
    """Draw independent discrete Laplace values.

    Args:
        stream: source of all randomness; the same stream, scale and size give the same values on
            every machine.
        scale: P(x) is proportional to exp(-|x| / scale); above 0, at most 2^48. With q as above,
            the variance is 2 q / (1 - q)^2, nearly 2 scale^2 for large scales.
        size: number of values.

    Returns:
        (size,), int64, each less than 2^56 in magnitude.
    """
    if not 0 < scale <= _LARGEST:
        raise ValueError(f"a scale of {scale}")
    coins = _coins(scale)
    parts = [
        _chunk(stream, number, coins, min(_CHUNK, size - start))
        for number, start in enumerate(range(0, size, _CHUNK))
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@lru_cache(maxsize=64)
def _coins(scale: Fraction) -> tuple[int, ...]:
    """Compute coin probabilities, times 2^136 and rounded down.

    The first is P(X is not 0), the others are those of the digits of G, lowest first. P(X is not 0)
    = 2 q / (1 + q), where q / (1 + q) is the probability of the lowest digit.
    """
    digits: list[int] = []
    rate = _PRECISE.divide(Decimal(scale.denominator), Decimal(scale.numerator))
    # exp(-95) is below 2^-136, so higher digits are never set.
    while rate < 95:
        power = _PRECISE.add(Decimal(1), _PRECISE.exp(rate))
        digits.append(int(_PRECISE.divide(Decimal(1 << _BITS), power)))
        rate = _PRECISE.multiply(rate, Decimal(2))
    return (2 * digits[0], *digits) if digits else (0,)


def _chunk(stream: Stream, number: int, coins: tuple[int, ...], size: int) -> np.ndarray:
    planes = np.frombuffer(stream.take(b"head", number, (len(coins) + 1) * size), np.uint8)
    planes = planes.reshape(len(coins) + 1, size)
    nonzero, *tossed = _toss(stream, number, planes[1:], coins)
    # Eight digits per byte, which is several times as fast as 64-bit words.
    digits = np.zeros((8, size), np.uint8)
    for place, one in enumerate(tossed):
        digits[place // 8] |= one << np.uint8(place % 8)
    values = np.ascontiguousarray(digits.T).view("<i8")[:, 0].astype(np.int64) + 1
    np.negative(values, out=values, where=(planes[0] & 1).astype(bool))
    values *= nonzero
    return values


def _toss(stream: Stream, number: int, planes: np.ndarray, coins: tuple[int, ...]) -> np.ndarray:
    """Toss coins, and return the outcomes.

    Args:
        stream, number: source of the bytes after the first.
        planes: (coins, size), uint8: first bytes.
        coins: probabilities, times 2^136.

    Returns:
        (coins, size), uint8 of 0 and 1.
    """
    mask = (1 << 64) - 1
    parts = ((coin >> 128, coin >> 64 & mask, coin & mask) for coin in coins)
    first, middle, last = (np.array(part, np.uint64) for part in zip(*parts, strict=True))
    byte = first.astype(np.uint8)[:, None]
    tossed = (planes < byte).view(np.uint8)
    coin, place = np.nonzero(planes == byte)
    raw = stream.take(b"tail", number, _TAIL * len(coin))
    high, low = np.frombuffer(raw, ">u8").reshape(-1, 2).T
    tossed[coin, place] = (high < middle[coin]) | ((high == middle[coin]) & (low < last[coin]))
    return tossed
