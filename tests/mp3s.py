"""Small MP3 files, and their frames."""

from __future__ import annotations

import io
from functools import cache

# MPEG audio: kbit/s and Hz by index, as the standards list them.
MPEG_KBITS = {
    1: [0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320],
    2: [0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
}
MPEG_HERTZ = {1: [44_100, 48_000, 32_000], 2: [22_050, 24_000, 16_000], 0: [11_025, 12_000, 8_000]}
TINY_SECONDS = 16 * 576 / 16000
# The tag that ffmpeg writes before the frames, as in real clips.
ID3 = b"ID3\x04\0\0\0\0\0\x23TSSE\0\0\0\x0f\0\0\x03Lavf57.83.100\0" + bytes(10)


@cache
def tiny_mp3() -> bytes:
    """Return a tone at 16 kHz, of `TINY_SECONDS`, with a tag but no Info frame (Common Voice)."""
    import numpy as np
    import soundfile

    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16000)
    file = io.BytesIO()
    options = {"bitrate_mode": "CONSTANT", "compression_level": 0.85}
    soundfile.write(file, tone, 16000, format="MP3", subtype="MPEG_LAYER_III", **options)
    # 32 kbit/s: all frames have 144 bytes.
    content = file.getvalue()
    assert b"Info" not in content and len(content) == 16 * 144
    return ID3 + content


def silent_mp3(seconds: float) -> bytes:
    """Return silence of `seconds`, give or take 36 ms: frames of 72 bytes and 72 ms, at 8 kHz."""
    return b"\xff\xe3\x18\xc0".ljust(72, b"\0") * round(seconds / 0.072)


def frames_of(raw: bytes) -> list[bytes]:
    """Return the frames of a faultless MP3 without tags, in order."""
    place, frames = 0, []
    while place < len(raw):
        assert raw[place] == 0xFF and raw[place + 1] & 0xE6 == 0xE2
        version = {3: 1, 2: 2, 0: 0}[raw[place + 1] >> 3 & 3]
        rate = MPEG_HERTZ[version][raw[place + 2] >> 2 & 3]
        bits = 1000 * MPEG_KBITS[version or 2][raw[place + 2] >> 4]
        size = (144 if version == 1 else 72) * bits // rate + (raw[place + 2] >> 1 & 1)
        frames.append(raw[place : place + size])
        place += size
    assert place == len(raw)
    return frames
