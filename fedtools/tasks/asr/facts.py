"""What a site tells the server of its clients' utterances."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir, invert
from fedtools.tasks.client_facts import ClientFacts
from fedtools.tasks.site_facts import SiteFacts


def of_site(folder: Path) -> SiteFacts:
    """Return each client's number of utterances, and the number of values in a frame.

    Raises:
        UserError: if the data have no clients, or a client's utterance has no features.
    """
    if not (folder / "utt2client").exists():
        raise UserError("the data have no clients", path=folder, remedy="add utt2client to it")
    data = DataDir.read(folder, "utt2spk", "feats.scp", "utt2client")
    owned = invert(data.utt2client)
    data.check_features(data.utt2client)
    values = FeatureReader(data.feats_scp).shape(next(iter(data.utt2client)))[1]
    sizes = np.array([len(names) for names in owned.values()], np.int64)
    return SiteFacts(ClientFacts([*owned], {"size": sizes}), values=values)
