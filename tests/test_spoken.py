"""The spoken words of written sentences."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from fedtools.files.spoken import normalise


@given(st.text())
def test_english_is_words_and_stays_as_it_is(sentence):
    text, reason = normalise(sentence, "en")
    assert bool(text) != bool(reason)
    if text:
        assert re.fullmatch(r"[a-z]([a-z']*[a-z])?( [a-z]([a-z']*[a-z])?)*", text)
        assert normalise(text, "en") == (text, "")
