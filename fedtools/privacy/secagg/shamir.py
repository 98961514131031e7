"""Sharing of a secret among k, any t of whom recover it.

A. Shamir: How to share a secret, Communications of the ACM 22 (1979). The secret is the value at 0
of a random polynomial of degree t - 1 over a prime field, and holder x has its value at x. Fewer
than t values are consistent with every secret, equally. The field's prime is the smallest above
2^256, so that a secret is any 32 bytes; a value has 33.

Python's whole numbers are fast enough: a client deals 2 secrets to 180 in some milliseconds. Their
time depends on the values, which nobody can measure who could not read the memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33


def deal(secret: bytes, holders: Sequence[int], threshold: int) -> list[bytes]:
    """Share a secret.

    Args:
        secret: 32 bytes.
        holders: different whole numbers above 0, at which the polynomial is evaluated.
        threshold: t, from 1 to the number of holders.

    Returns:
        a share of 33 bytes for each holder.

    Raises:
        ValueError: if an argument is out of range.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"{threshold} of {len(holders)} shares")
    _check(holders)
    random = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    # Highest degree first, for Horner's rule.
    return _evaluate([*random, int.from_bytes(secret, "big")], holders)


def _evaluate(coefficients: Sequence[int], points: Sequence[int]) -> list[bytes]:
    found = []
    for point in points:
        value = 0
        # Points are small, so that a reduction every few steps is as good as one in each.
        for start in range(0, len(coefficients), 8):
            for coefficient in coefficients[start : start + 8]:
                value = value * point + coefficient
            value %= PRIME
        found.append(value.to_bytes(SHARE_BYTES, "big"))
    return found


def recover(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Recover a secret from shares.

    Args:
        shares: holder -> share, at least t of them; the first t in the order of holders are used,
            so that secrets with the same holders have the same coefficients.

    Raises:
        ValueError: if there are fewer than t, or they are no shares of a secret. Shares of which
            some are wrong give a wrong secret, or this error.
    """
    points = tuple(sorted(shares)[:threshold])
    if len(points) < threshold:
        raise ValueError(f"{len(points)} shares, and {threshold} are needed")
    total = sum(
        factor * _number(shares[point])
        for factor, point in zip(_coefficients(points), points, strict=True)
    )
    if (value := total % PRIME) >> 8 * SECRET_BYTES:
        raise ValueError("no shares of one secret")
    return value.to_bytes(SECRET_BYTES, "big")


def _number(share: bytes) -> int:
    value = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise ValueError("a share out of range")
    return value


@lru_cache(maxsize=1024)
def _coefficients(points: tuple[int, ...]) -> tuple[int, ...]:
    """Compute Lagrange's coefficients at 0: of point i, the product over j of x_j / (x_j - x_i)."""
    _check(points)
    whole = prod(points)
    # The quotients of small numbers are exact until the one division in the field.
    return tuple(
        (whole // one) * pow(prod(other - one for other in points if other != one), -1, PRIME)
        for one in points
    )


def _check(points: Sequence[int]) -> None:
    if len(set(points)) < len(points) or min(points) < 1 or max(points) >= 1 << 32:
        raise ValueError("holders are different numbers from 1 to 2^32 - 1")
