"""Speakers of English accents, synthesised by espeak-ng.

An accent is a phoneme table of espeak-ng and a list of shifts. A sentence is first converted to the
phonemes of British English, then every phoneme is replaced by the accent's ("t$" is a t at the end
of a word), and the result is spoken as `[[phonemes]]`. The shifts are those that the textbooks give
for broad speakers (Wells 1982, Accents of English, volumes 2 and 3), written in espeak-ng's
mnemonics. They make words of one accent sound like other words of another: an Australian "tail" is
nearly an American "tile", and an Indian "wine" is "vine".

A speaker is a vocal tract (formant frequencies, heights and widths), a voice (pitch, range,
roughness, breath), a speed, a distance from the microphone and a room's noise.

espeak-ng carries random state from one call to the next. Every utterance is therefore spoken in a
forked child that seeds it; the same utterance always has the same samples.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RATE = 16000

# Australian: the front vowels TRAP, DRESS and KIT are raised; FLEECE, FACE, PRICE, GOAT and MOUTH
# start lower or further back; the vowels of START and STRUT are front; BATH is long.
AUSTRALIAN = {
    "a": "E", "E": "I", "I": "i", "i:": "@ i", "eI": "aI", "aI": "OI", "oU": "aU", "aU": "a w",
    "u:": "U u:", "A@": "a: ", "A:": "a:", "aa": "a:", "O:": "o:", "O@": "o:", "o@": "o:",
    "e@": "e:", "i@": "i:", "i@3": "i: @",
}  # fmt: skip
# Indian: retroflex t and d, dental stops for th, one sound for v and w, unaspirated p t k (as in
# Hindi), a tapped r wherever it is written, FACE and GOAT without glide, full vowels in place of
# schwa.
INDIAN = {
    "t": "t.", "d": "d.", "t2": "t.", "t#": "t.", "T": "t", "D": "d", "w": "v", "w#": "v",
    "tS": "c", "dZ": "J", "Z": "z", "N": "N g", "a": "E:", "aa": "a:", "A:": "a:", "A@": "a: r",
    "0": "O", "O:": "O:", "O@": "o: r", "o@": "o: r", "eI": "e:", "oU": "o:", "OI": "O: j",
    "e@": "e: r", "i@": "i: r", "i@3": "i: V r", "U@": "u: r", "3:": "V r", "3": "V r",
    "@": "V", "@2": "V", "@5": "V", "a#": "V", "I2": "I", "I#": "I", "i": "i:", "@L": "V l",
}  # fmt: skip
# England: broad speech of the south east. th becomes f, h is dropped, FACE and GOAT start lower,
# and at the end of a word l becomes a vowel and t a glottal stop.
SOUTH_EAST = {"T": "f", "h": "", "eI": "aI", "oU": "V U", "aU": "a:", "l$": "U", "t$": "?"}


@dataclass(frozen=True)
class Accent:
    """An accent: its name, the lines of an espeak-ng voice, and its shifts of phonemes."""

    text: str
    voice: tuple[str, ...]
    shifts: tuple[tuple[str, str], ...] = ()


def _accent(text: str, *voice: str, shifts: dict[str, str] | None = None) -> Accent:
    return Accent(text, voice, tuple((shifts or {}).items()))


INDIA = "India and South Asia (India, Pakistan, Sri Lanka)"
WEST_INDIES = "West Indies and Bermuda (Bahamas, Bermuda, Jamaica, Trinidad)"
EVEN = "stressLength 215 215 215 215 0 0 225 225"
US = ("language en-us", "phonemes en-us", "stressLength 140 120 190 170 0 0 255 300")
NYC = ("language en-us", "phonemes en-us-nyc", "stressLength 140 120 190 170 0 0 255 300")
SCOTLAND = ("language en", "phonemes en-sc", "stressLength 180 130 200 200 0 0 250 270")
CARIBBEAN = ("language en", "phonemes en-wi", "stressLength 175 175 175 175 220 220 250 290")
# Accent of Common Voice -> its ways of speaking, which its speakers use in turn.
ACCENTS = {
    "au": (_accent("Australian English", "language en", shifts=AUSTRALIAN),),
    "en": (
        _accent("England English", "language en", "phonemes en-rp", shifts=SOUTH_EAST),
        _accent("England English", "language en", shifts=SOUTH_EAST),
    ),
    "in": (_accent(INDIA, "language hi", EVEN, shifts=INDIAN),),
    "us": (
        _accent("United States English", *US),
        _accent("United States English", *US),
        _accent("United States English", *NYC),
    ),
    "scotland": (_accent("Scottish English", *SCOTLAND),),
    "bermuda": (_accent(WEST_INDIES, *CARIBBEAN),),
}


@dataclass(frozen=True)
class Speaker:
    """One speaker; `voice` is the content of an espeak-ng voice file."""

    client_id: str
    accent: Accent
    gender: str
    age: str
    voice: str
    words_per_minute: int
    level: float
    noise: float


def random_of(*key: object) -> np.random.Generator:
    """Return a generator of random numbers that depends on the key alone."""
    digest = hashlib.sha256("\0".join(map(str, key)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))


def make_speaker(accent: str, number: int, seed: int) -> Speaker:
    """Make an accent's speaker of a given number: of alternating sex, all else drawn at random."""
    ways = ACCENTS[accent]
    way = ways[number % len(ways)]
    female = number // len(ways) % 2 == 0
    random = random_of(seed, "speaker", accent, number)
    tract = random.uniform(1.06, 1.17) if female else random.uniform(0.92, 1.03)
    pitch = random.uniform(140, 210) if female else random.uniform(70, 115)
    lines = ["name speaker", *way.voice]
    lines.append(f"pitch {pitch:.0f} {pitch * random.uniform(1.25, 1.7):.0f}")
    for formant in range(9):
        frequency = 100 * tract * random.uniform(0.98, 1.02)
        height, width = random.uniform(85, 105), random.uniform(90, 120)
        lines.append(f"formant {formant} {frequency:.0f} {height:.0f} {width:.0f}")
    lines.append(f"flutter {random.integers(2, 8)}")
    lines.append(f"roughness {random.integers(0, 5)}")
    lines.append(f"voicing {random.integers(80, 120)}")
    lines.append(f"consonants {random.integers(85, 115)} {random.integers(85, 115)}")
    return Speaker(
        client_id=hashlib.sha512(f"{seed} {accent} {number}".encode()).hexdigest(),
        accent=way,
        gender="female_feminine" if female else "male_masculine",
        age=str(random.choice(["teens", "twenties", "thirties", "fourties", "fifties"])),
        voice="\n".join(lines) + "\n",
        words_per_minute=int(random.integers(125, 170)),
        level=float(10 ** (random.uniform(-12, 0) / 20)),
        noise=float(10 ** (random.uniform(-45, -30) / 20)),
    )


def resample(samples: np.ndarray) -> np.ndarray:
    """Resample from 22,050 Hz to 16,000 Hz, cutting off above 8,000 Hz: 441 samples become 320."""
    blocks = -(-len(samples) // 441)
    spectrum = np.fft.rfft(samples / 32768, 441 * blocks)[: 160 * blocks + 1]
    return np.fft.irfft(spectrum, 320 * blocks) * (320 / 441)


class Synthesiser:
    """espeak-ng, initialised in this process and used only in its forked children."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._chunks: list[bytes] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._collect)
        data = espeakng_loader.get_data_path().encode()
        # Without this, a second initialisation would lose the phoneme tables.
        self._library.espeak_Terminate()
        synchronous = 2  # AUDIO_OUTPUT_SYNCHRONOUS: no sound card, and no thread to fork
        rate = self._library.espeak_Initialize(synchronous, 0, data, 0)
        if rate != 22050:
            raise RuntimeError(f"espeak-ng does not start as expected: {rate}")
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        # The first call reads the files of all voices: do it here, not in every child.
        if self._library.espeak_SetVoiceByName(b"en"):
            raise RuntimeError("espeak-ng has no voice 'en'")

    def say(
        self, text: str, speaker: Speaker, random: np.random.Generator, pitch: int | None = None
    ) -> np.ndarray:
        """Return the speaker's voice without noise: float64 samples at 16 kHz, within [-1, 1].

        Args:
            text: English words.
            speaker: the speaker.
            random: one number is drawn from it, as espeak-ng's random seed.
            pitch: 0 to 100, where 50 is the speaker's own pitch, and the default.
        """
        return resample(self._in_child(text, speaker, int(random.integers(1, 2**31)), pitch))

    def speak(self, text: str, speaker: Speaker, key: str) -> np.ndarray:
        """Return a text spoken in the speaker's room: float32 samples at 16 kHz, within [-1, 1].

        The speaker and the key determine all random numbers of the utterance.
        """
        random = random_of("utterance", speaker.client_id, key)
        wave = self.say(text, speaker, random)
        wave *= 0.7 * speaker.level / max(np.abs(wave).max(), 1e-3)
        wave += speaker.noise * speaker.level * random.standard_normal(len(wave)) * 0.2
        return np.clip(wave, -1, 1).astype(np.float32)

    def phonemes(self, text: str, accent: Accent) -> str:
        """Return the text as the accent's phonemes; this changes the state of the library."""
        library = self._library
        shifts = dict(accent.shifts)
        words = []
        for word in text.split():
            pointer = ctypes.c_char_p(word.encode())
            separated = 1, ord("+") << 8
            raw = library.espeak_TextToPhonemes(ctypes.byref(pointer), *separated).decode()
            sounds = []
            spoken = raw.strip().split("+")
            for position, sound in enumerate(spoken, 1):
                bare = sound.lstrip("',%=")
                stress = sound[: len(sound) - len(bare)]
                end = "$" if position == len(spoken) else ""
                for shifted in shifts.get(bare + end, shifts.get(bare, bare)).split():
                    sounds.append(stress + shifted)
                    stress = ""
            words.append("|".join(sounds))
        return " ".join(words)

    def _collect(self, samples: int | None, count: int, events: int | None) -> int:
        if samples and count > 0:
            self._chunks.append(ctypes.string_at(samples, 2 * count))
        return 0

    def _in_child(self, text: str, speaker: Speaker, seed: int, pitch: int | None) -> np.ndarray:
        """Return the samples of one utterance, as int16 at espeak-ng's rate."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(reading)
                self._speak_here(text, speaker, seed, pitch)
                with os.fdopen(writing, "wb") as pipe:
                    pipe.write(b"".join(self._chunks))
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            samples = np.frombuffer(pipe.read(), dtype="<i2")
        _, status = os.waitpid(child, 0)
        if status or not len(samples):
            raise RuntimeError(f"espeak-ng cannot speak {text!r}")
        return samples

    def _speak_here(self, text: str, speaker: Speaker, seed: int, pitch: int | None) -> None:
        library = self._library
        library.espeak_SetSynthCallback(self._callback)
        library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
        sounds = f"[[{self.phonemes(text, speaker.accent)}]]".encode()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # espeak-ng would take a "+" in a path for a variant's name
            Path("voice").write_text(speaker.voice)
            if library.espeak_SetVoiceByFile(b"voice"):
                raise RuntimeError("espeak-ng refuses a voice")
        library.espeak_SetParameter(1, speaker.words_per_minute, 0)  # 1: espeakRATE
        if pitch is not None:
            library.espeak_SetParameter(3, pitch, 0)  # 3: espeakPITCH
        phonemes_in_utf8 = 0x100 | 1
        length = ctypes.c_size_t(len(sounds) + 1)
        if library.espeak_Synth(sounds, length, 0, 0, 0, phonemes_in_utf8, None, None):
            raise RuntimeError("espeak-ng refuses a text")
