"""What is known of the clients of a federation of keywords: their clips, and what follows of them.

Some methods allot a client's steps by what other clients have, so that a site, which has only its
own clients' clips, could not compute them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.data.clips import Clips
from fedtools.methods.base import Method
from fedtools.tasks.client_facts import ClientFacts
from fedtools.tasks.site_facts import SiteFacts


def of_site(folder: Path) -> SiteFacts:
    """Return what a site tells of its clips: classes, length, and each client's size and entropy.

    The entropy is that of the client's labels, divided by log(classes).
    """
    return of_clips(Clips.read(folder))


def of_clips(clips: Clips) -> SiteFacts:
    """Return the same of clips that have been read."""
    own = ClientFacts(clips.clients, {"size": clips.sizes, "entropy": clips.entropies()})
    return SiteFacts(own, samples=clips.samples, classes=tuple(clips.classes))


def as_one(clips: Clips, name: str) -> ClientFacts:
    """Return size and entropy of clips of any clients, as those of one client."""
    whole = replace(clips, clients=[name], edges=np.array([0, len(clips.labels)]))
    return of_clips(whole).clients


def prepared(known: ClientFacts, method: Method, batch_size: int, where: Path) -> ClientFacts:
    """Add the method's own values, such as the steps of a round, to sizes and entropies.

    Args:
        where: where the sizes are from, for messages.

    Raises:
        UserError: if the method cannot work with these clients.
    """
    sizes, entropies = known.values["size"], known.values["entropy"]
    try:
        own = method.prepare(sizes, entropies, batch_size)
    except ValueError as error:
        raise UserError(str(error), path=where) from None
    return ClientFacts(known.clients, {"size": sizes, "entropy": entropies, **own})
