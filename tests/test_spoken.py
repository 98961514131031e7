"""The spoken words of written sentences: unchanged rules for English, all letters elsewhere."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtools.data.datadir import DataDir
from fedtools.data.languages import is_language
from fedtools.data.validate import validate_data_dir
from fedtools.data.written_to_spoken import LANGUAGES, normalise, rules_of

# Output of prepare.py before there were other languages.
ENGLISH = [
    ("What is the forecast in Kentucky", "what is the forecast in kentucky", ""),
    ("It\u2019s Ben\u2019s \u2018cat\u2019!", "it's ben's cat", ""),
    ('"So it is, they said', "so it is they said", ""),
    ("Caf\u00e9\u2014au lait\u2026 well-known", "cafe au lait well known", ""),
    (" a  double\u00a0blank ", "a double blank", ""),
    ("'Twas the dogs' bone, rock 'n' roll", "twas the dogs bone rock n roll", ""),
    ("O`Neill\u00b4s a\u2032b \u02bcx", "o'neill's a'b x", ""),
    ("na\u00efve \u0130stanbul, \uff26ull \ufb01le", "naive istanbul full file", ""),
    ("a\u200cb \u00ad\u200bc", "a b c", ""),
    ("e\u0301clair \u00aa", "eclair a", ""),
    ("In 1999 it rained.", "", "digits"),
    ("\u00bd a pound \u00b2", "", "digits"),
    ("Salt & pepper", "", "symbols"),
    ("Two \u20ac", "", "symbols"),
    ("and/or", "", "symbols"),
    ("Stra\u00dfe", "", "letters outside a-z"),
    ("\u041f\u0440\u0438\u0432\u0435\u0442", "", "letters outside a-z"),
    ("...", "", "empty text"),
    ("'", "", "empty text"),
    ("re\u0301sume\u0301: O.K.; (he) said_so", "resume o k he said so", ""),
    ("\u01c4 \u0132", "dz ij", ""),
    ("\u2167", "viii", ""),
    ("a''b", "a''b", ""),
    ("na\tb\rc", "na b c", ""),
    ("\ue000 x", "x", ""),
    ("m\u00fa\u0142", "", "letters outside a-z"),
]

# By hand: language, sentence, words.
OTHERS = [
    ("de", "Die Straße ist SCHÖN – „Größe“; ẞ", "die straße ist schön größe ß"),
    ("de", "scho\u0308n in İstanbul", "schön in istanbul"),
    ("tr", "IŞIK İstanbul\u2019da, i\u0307yi", "ışık istanbul'da iyi"),
    ("az", "QIZIL I\u0307Ş", "qızıl iş"),
    ("lt", "I\u0301 i\u0307\u0301", "í i\u0307\u0301"),
    # Tatweel, marks, ligatures, an isolated form of a mark, a direction mark.
    ("ar", "الــسلام، قُلْ", "السلام قُلْ"),
    ("ar", "\ufefb \ufdf2 ب\ufe76 \u200fب", "لا الله بَ ب"),
    ("fa", "می\u200c\u200cخواهم \u200cمی\u200c تو", "می\u200cخواهم می تو"),
    ("ml", "അവന്\u200d അവന്\u200c.", "അവന്\u200d അവന്"),
    ("bn", "র\u200d্যাব", "র\u200d্যাব"),
    ("sd", "آء ۽ تون ۾", "آء ۽ تون ۾"),
    # Two spellings of one letter; a danda, and a bar typed for it.
    ("hi", "\u0958ाम है। है|", "क़ाम है है"),
    ("my", "မြန်မာ၏၊ ၌။", "မြန်မာ၏ ၌"),
    ("bo", "བོད་སྐད།", "བོད སྐད"),
    ("th", "น้ำๆ ก\u200bก", "น้ำๆ กก"),
    # Half-width katakana with their marks, full-width letters, the ideographic zero, a radical.
    (
        "ja",
        "\uff8a\uff9f\uff70\uff83\uff68\uff70、\uff76\uff9e二\u3007\uff21\uff22\uff5e",
        "パーティー ガ二\u3007ab",
    ),
    ("zh-CN", "约翰·史密斯\uff0c\u2f08", "约翰 史密斯 人"),
    ("nan-tw", "知影 (tsai-iánn) 矣\uff08--ah\uff09。", "知影 矣"),
    ("ko", "ㅋㅋ \u1112\u1161\u11ab", "ㅋㅋ 한"),
    ("ca", "Col·legi, col.legi i paraŀlel. L", "col·legi col·legi i paral·lel l"),
    ("fr", "l\u2019été · aujourd'hui \u2018toi\u2019", "l'été aujourd'hui toi"),
    ("br", "C\u2019hoar", "c'hoar"),
    ("uk", "м'ята м\u2019ята м\u02bcята", "м'ята м'ята м'ята"),
    (
        "uz",
        "O'zbek o\u2018g\u02bbil bog` ma\u2019no",
        "o\u02bbzbek o\u02bbg\u02bbil bog\u02bb ma'no",
    ),
    ("mt", "ta\u2019 l-iskola 'tajba'", "ta' l iskola tajba"),
    ("haw", "\u02bbŌlelo Hawai\u02bbi", "\u02bbōlelo hawai\u02bbi"),
    ("he", "צה\"ל ג'ורג' 'לא' צ׳", "צה״ל ג׳ורג׳ לא צ׳"),
    ("hy-AM", "Ինչո՞ւ \u0587 մ՚ըսեւ։", "ինչու \u0587 մ'ըսեւ"),
    ("ka", "ᲡᲐქ", "საქ"),
    ("el", "ΟΔΟΣ. ΑΣ.ΚΑΛΑ", "οδος ας καλα"),
    ("nl", "Ĳsland, \ufb01ets", "ijsland fiets"),
    ("vi", "Tie\u0302\u0301ng Việt", "tiếng việt"),
    ("yo", "Ọ\u0301rọ\u0300", "ọ\u0301rọ\u0300"),
    ("kab", "Aɣrum s\u2011Ɣer", "aɣrum s ɣer"),
    ("ab", "Әҩағ", "әҩағ"),
    ("xx", "a\u00adb a\u200bb a\u034fb", "ab ab ab"),
    # The typed form of Catalan's dot; a hyphen is not one.
    *[
        ("ca", f"Al{dot}lot I CEL{dot}LA.", "al·lot i cel·la")
        for dot in "\u00b7.\u2022\u2027\u2219\u22c5\u30fb\uff65\u2024\u2e31\ua78f\u0387"
    ],
    ("ca", "a\u0140lot A\u013fLOT l-l fi.La a.b", "al·lot al·lot l l fi la a b"),
    ("cat", "al.lot", "al·lot"),
    # Typed forms of geresh and gershayim, and quotation marks.
    *[
        ("he", f"ג{mark}ירפה", "ג׳ירפה")
        for mark in "'\u2019\u2018\u201b`\u00b4\u2032\u02bc\u02b9\u05f3"
    ],
    *[
        ("he", f"צה{mark}ל", "צה״ל")
        for mark in '" \u201c \u201d \u201e \u201f \u2033 \u02ba \u02dd \u05f4'.split()
    ],
    *[("he", f"צה{mark}ל", "צה״ל") for mark in ("''", "\u2019\u2019", "\u05f3\u05f3", "\uff02")],
    ("heb", "אמר ''שלום'' לצה''ל", "אמר שלום לצה״ל"),
    ("iw", "\u201eשלום\u201d רב", "שלום רב"),
    # The typed form of the glottal stop is a letter; quotation marks are not.
    *[
        ("haw", f"{mark}Ōlelo Hawai{mark}i a {mark}o", "\u02bbōlelo hawai\u02bbi a \u02bbo")
        for mark in "\u02bb'\u2018\u2019\u201b`\u00b4\u2032\u02bc\u02bd\u02bf\ua78c"
    ],
    ("haw", "'hele' \u2018mai\u2019 'o ka hale'", "hele mai o ka hale"),
    ("sm", "fa'a\u2019afoi", "fa\u02bba\u02bbafoi"),
    # Elision, with a separate letter or accent; quotation marks.
    *[
        ("el", f"γι{mark} αυτό, θα {mark}ρθω", "γι' αυτό θα 'ρθω")
        for mark in "'\u2019\u1fbd\u1fbf\u0384\u02bc\u00b4"
    ],
    ("ell", "\u2018το σπίτι\u2019 \u2018ναι\u2019 «απ\u2019 όλα»", "το σπίτι ναι απ' όλα"),
    ("el", "\u00b5\u03ad\u03bb\u03b9", "μέλι"),
    ("ko", "교육\u318d문화 한\u318d중\u00b7일", "교육 문화 한 중 일"),
    # As typed: in another order, and decomposed.
    *[("th", f"น{am} นำ", "น\u0e49\u0e33 นำ") for am in ("\u0e49\u0e33", "\u0e33\u0e49")],
    *[("tha", f"น{am}", "น\u0e49\u0e33") for am in ("\u0e4d\u0e49\u0e32", "\u0e49\u0e4d\u0e32")],
    ("th", "น\u0e4d\u0e32 \u0e40\u0e40ม่", "น\u0e33 \u0e41ม่"),
    (
        "lo",
        "ນ\u0ecd\u0ec9\u0eb2 ນ\u0ec9\u0ecd\u0eb2 ນ\u0eb3\u0ec9",
        "ນ\u0ec9\u0eb3 ນ\u0ec9\u0eb3 ນ\u0ec9\u0eb3",
    ),
    ("lao", "\u0ec0\u0ec0ມ່", "\u0ec1ມ່"),
    ("ja", "か\u309bハ\u309cハ\u309bう\u309b", "がパバ\u3094"),
    # Other codes of the same languages.
    *[(code, "IĞDIR", "ığdır") for code in ("tr", "tur", "tr-CY", "TUR", "azj", "aze")],
    *[(code, "IDEE ẞ", "idee ß") for code in ("deu", "ger", "de-AT", "xyz")],
    *[(code, "知(ti)", "知 ti") for code in ("zh", "cmn", "zho", "chi")],
    ("nan", "知(ti)", "知"),
]
NOTHING = [
    ("de", "1999", "digits"),
    ("hi", "१२", "digits"),
    ("de", "x²", "digits"),
    ("es", "1ª", "digits"),
    ("es", "la Mª", "symbols"),
    ("ja", "ガ\uff06", "symbols"),
    ("de", "20 €", "digits"),
    ("ar", "٪", "symbols"),
    ("pl", "za\ue000", "unknown characters"),
    ("ru", "\u0301 - — \u02bc '", "empty text"),
]


@pytest.mark.parametrize(("sentence", "words", "reason"), ENGLISH)
def test_english_is_what_it_always_was(sentence, words, reason):
    for code in ("en", "en-GB", "eng", "EN_US"):
        assert normalise(sentence, code) == (words, reason)


@pytest.mark.parametrize(("language", "sentence", "words"), OTHERS)
def test_other_languages_keep_their_letters(language, sentence, words):
    assert normalise(sentence, language) == (words, "")
    assert normalise(unicodedata.normalize("NFD", sentence), language) == (words, "")


@pytest.mark.parametrize(("language", "sentence", "reason"), NOTHING)
def test_what_cannot_be_read_is_no_text(language, sentence, reason):
    left_out: Counter[str] = Counter()
    assert normalise(sentence, language, left_out) == ("", reason)
    assert not left_out


def test_what_is_left_out_is_counted_by_character():
    left_out: Counter[str] = Counter()
    normalise("Ja, ja \u2013 \u00ab'so'\u00bb so\u00adgar!", "de", left_out)
    assert left_out == {",": 1, "\u2013": 1, "\u00ab": 1, "'": 2, "\u00bb": 1, "\u00ad": 1, "!": 1}
    left_out.clear()
    normalise("\u77e5(ti) na\u00efve", "nan-tw", left_out)
    assert left_out == {"(": 1, "t": 1, "i": 1, ")": 1}
    left_out.clear()
    normalise("na\u00efve.", "en", left_out)
    assert left_out == {"\u0308": 1, ".": 1}
    left_out.clear()
    # A joiner within a word stays.
    normalise("می\u200cخواهم\u200c \u200cنه", "fa", left_out)
    assert left_out == {"\u200c": 2}
    left_out.clear()
    # Respelled symbols are not left out.
    for language, sentence in (
        ("ko", "교육\u318d문화"),
        ("haw", "'hele' Hawai'i"),
        ("th", "\u0e40\u0e40ม น\u0e4d\u0e32"),
        ("ca", "al.lot"),
        ("he", "'לא' צה''ל"),
    ):
        normalise(sentence, language, left_out)
    assert left_out == {"\u318d": 1, "'": 4}


# Of every script and kind, and the characters that rules are about.
SOME = (
    "aBiIlLoOgGnsS\u00df\u1e9e\u0130\u0131\u0132\u0149\u017f\u01c5\u03a3\u03c3\u03c2\u0411"
    "\u044f\u0587\u05d0\u05dc\u05b4\u0628\u0644\u0915\u094d\u093c\u0d28\u0d4d\u0e19\u0e33"
    "\u1019\u104f\u10d0\u1c90\u3042\u3099\uff76\uff9e\u4e00\u3007\ud55c\u1112\u1161\u11ab"
    "\u314b\uff21\ufb01\ufefb\ufe76\ufdfa\u0301\u0307\u0308\u0328\u0345'\u2019\u2018\u02bc"
    '\u02bb`\u05f3\u05f4"\u00b7.\u2022\u200c\u200d\u200b\u00ad\u0640\u055e\ufe0f()-\u2014 '
    "\u00a0\u30fb"
)
SENTENCES = st.text(st.sampled_from(SOME), max_size=12) | st.text(max_size=12)
CODES = st.sampled_from(["en", "de", "lt", "sat", *LANGUAGES])


@given(SENTENCES, CODES)
def test_the_outcome_is_words_and_stays_as_it_is(sentence, language):
    text, reason = normalise(sentence, language)
    assert bool(text) != bool(reason)
    assert normalise(unicodedata.normalize("NFD", sentence), language) == (text, reason)
    if not text:
        return
    assert normalise(text, language) == (text, "")
    assert text == unicodedata.normalize("NFC", text) == " ".join(text.split())
    if language == "en":
        assert re.fullmatch(r"[a-z]([a-z']*[a-z])?( [a-z]([a-z']*[a-z])?)*", text)
    else:
        assert (
            text == text.lower() and text.replace("\u200c", "").replace("\u200d", "").isprintable()
        )


# Letters of every alphabet, which stay unchanged.
LETTERS = st.characters(categories=["Lu", "Ll", "Lo", "Lm", "Mn", "Mc"]).filter(
    lambda mark: (
        unicodedata.normalize("NFKC", mark) == mark
        and not unicodedata.name(mark, "").startswith(
            ("VARIATION", "HANGUL", "MONGOLIAN FREE", "KHMER VOWEL INHERENT")
        )
        and mark not in "\u0640\u07fa\u02bc\u034f"
    )
)


@given(
    st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1),
    st.sampled_from(["de", "ta", "th", "ca"]),
)
def test_no_letter_and_no_mark_on_one_is_lost(words, language):
    words = ["a" + word for word in words]
    expected = unicodedata.normalize(
        "NFC", " ".join(word.lower() for word in words).replace("i\u0307", "i")
    )
    assert normalise("  ".join(words) + ".", language) == (expected, "")


@given(st.lists(SENTENCES, min_size=1, max_size=3), CODES)
def test_the_outcome_is_a_valid_text(tmp_path_factory, sentences, language):
    texts = [text for text, _ in (normalise(one, language) for one in sentences) if text]
    if not texts:
        return
    data = DataDir(tmp_path_factory.mktemp("data"))
    data.text = {f"s-{number}": text for number, text in enumerate(texts)}
    data.utt2spk = dict.fromkeys(data.text, "s")
    data.write()
    assert validate_data_dir(data.path, feats=False, wav=False).utterances == len(texts)


def test_codes():
    for code in (
        "en",
        "zh-CN",
        "zh_TW",
        "rm-vallader",
        "zh-Hant-TW",
        "nan-tw",
        "ga-IE",
        "cnh",
        "EN",
        *"deu ger eng cmn jpn tur iw kmr el-CY cmn_hans_cn nan rm-sursilv ca-valencia mk".split(),
    ):
        assert is_language(code), code
    for code in (
        "",
        "e",
        "cv-corpus-6.1",
        "cv-corpus",
        "clips",
        "de/../x",
        "de ",
        "a b",
        "123",
        "mini corpus",
        *"xx raw dev mini my-clips my-corpus cv_corpus tr-data de-small zh-Hant-TW-x-y".split(),
    ):
        assert not is_language(code), code
    unspaced = [code for code in LANGUAGES if not LANGUAGES[code].spaces]
    assert unspaced == "ja zh yue th lo km my bo dz shn nan".split()
    assert not rules_of("zh-HK").spaces and rules_of("ko").spaces and rules_of("vi").spaces
    for codes in ("ja jpn", "zh zho chi cmn wuu", "th tha", "lo lao", "km khm", "my mya bur"):
        assert not any(rules_of(code).spaces for code in codes.split())
    assert not any(rules_of(code).spaces for code in "bo bod tib dz dzo yue nan".split())
    assert all(rules_of(code).spaces for code in "kor ko vie ind xx jp".split())
