"""The spoken words of a written sentence, by the rules of its language."""

from __future__ import annotations

import re
import unicodedata


def normalise(sentence: str, language: str) -> tuple[str, str]:
    """Spoken words of a sentence, lower case: (text, "") or ("", why there is none).

    Args:
        sentence: as it is written.
        language: a code such as "en", "zh-CN" or "rm-vallader".
    """
    text = re.sub("[\u2018\u2019\u02bc\u0060\u00b4\u2032]", "'", sentence.lower())
    text = unicodedata.normalize("NFKD", text)
    if any(unicodedata.category(mark)[0] == "N" for mark in text):
        return "", "digits"
    if any(mark in "&%@#*/\\" or unicodedata.category(mark)[0] == "S" for mark in text):
        return "", "symbols"
    kept = []
    for mark in text:
        if "a" <= mark <= "z" or mark == "'":
            kept.append(mark)
        elif mark.isalpha():
            return "", "letters outside a-z"
        elif not unicodedata.combining(mark):
            kept.append(" ")
    words = [word.strip("'") for word in "".join(kept).split()]
    text = " ".join(word for word in words if word)
    return (text, "") if text else ("", "empty text")
