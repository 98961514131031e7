"""MP3 reading against frames counted by hand, and another decoder (dr_mp3)."""

from __future__ import annotations

import io
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import miniaudio
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from mp3s import ID3, frames_of, silent_mp3

from fedtools.audio.mpeg import MpegError, read_stream
from fedtools.audio.wave import AudioError, Wave, describe_recording, read_wave

# Header, bytes and samples of a frame, and its rate in Hz: 144 (MPEG 1) or 72 (2, 2.5) times the
# bit rate by the sample rate, rounded down, plus one if it is padded.
FRAMES = [
    ("fffb9000", 417, 1152, 44_100),
    ("fffb9200", 418, 1152, 44_100),
    ("fffb54c0", 192, 1152, 48_000),
    ("fffbe800", 1440, 1152, 32_000),
    ("fff348c0", 144, 576, 16_000),
    ("fff38000", 208, 576, 22_050),
    ("fff364c4", 144, 576, 24_000),
    ("ffe320c0", 104, 576, 11_025),
    ("ffe318c0", 72, 576, 8_000),
]


def tones(rate: int, channels: int, seconds: float = 0.7) -> np.ndarray:
    """Return silence followed by tones, which need more bits."""
    time_ = np.arange(round(rate * seconds)) / rate
    noise = 0.05 * np.random.default_rng(0).standard_normal((len(time_), channels))
    tone = 0.2 * np.sin(2 * np.pi * time_[:, None] * [300, 700][:channels]) + noise
    return (tone * (time_ > 0.3)[:, None]).astype(np.float32)


@cache
def encoded(rate: int = 16_000, channels: int = 1, mode: str = "VARIABLE") -> bytes:
    """Return an MP3 by LAME, with its Info or Xing frame."""
    file = io.BytesIO()
    options = {"bitrate_mode": mode, "compression_level": 0.3}
    soundfile.write(file, tones(rate, channels), rate, format="MP3", **options)
    raw = file.getvalue()
    assert b"Info" in raw[:60] or b"Xing" in raw[:60]
    return raw


@cache
def bare(rate: int = 16_000, channels: int = 1, mode: str = "VARIABLE") -> tuple[bytes, ...]:
    """Return the frames of the same file without the first."""
    return tuple(frames_of(encoded(rate, channels, mode))[1:])


def read(folder: Path, raw: bytes) -> Wave:
    (folder / "x.mp3").write_bytes(raw)
    wave = read_wave(str(folder / "x.mp3"))
    seconds, channels = describe_recording(str(folder / "x.mp3"))
    assert (seconds, channels) == (len(wave.samples) / wave.rate, wave.channels)
    return wave


def decoded(raw: bytes) -> np.ndarray:
    """Return the output of dr_mp3, mixed down."""
    found = miniaudio.mp3_read_f32(raw)
    return np.array(found.samples).reshape(-1, found.nchannels).mean(axis=1)


# --- lengths and samples equal another decoder's --------------------------------------------------


@pytest.mark.parametrize(("header", "size", "samples", "rate"), FRAMES)
def test_frames_of_every_kind_are_counted(tmp_path, header, size, samples, rate):
    frame = bytes.fromhex(header).ljust(size, b"\0")
    for count in (2, 3, 50):
        wave = read(tmp_path, frame * count)
        assert (len(wave.samples), wave.rate) == (count * samples, rate)
        assert not wave.samples.any()
        assert wave.channels == (1 if frame[3] >> 6 == 3 else 2)


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE", "AVERAGE"])
@pytest.mark.parametrize(
    ("rate", "channels"), [(48_000, 1), (44_100, 2), (22_050, 1), (16_000, 2), (8_000, 1)]
)
def test_all_samples_are_read_with_and_without_an_info_frame(tmp_path, rate, channels, mode):
    whole, frames = encoded(rate, channels, mode), bare(rate, channels, mode)
    wave = read(tmp_path, whole)
    # With its Info frame, the encoder's delay and the padding of the last frame are left out.
    expected = soundfile.read(io.BytesIO(whole), dtype="float32", always_2d=True)[0].mean(axis=1)
    assert len(wave.samples) == len(tones(rate, channels))
    np.testing.assert_allclose(wave.samples, expected, atol=1e-6)
    assert (wave.rate, wave.channels) == (rate, channels)

    wave = read(tmp_path, ID3 + b"".join(frames))
    assert len(wave.samples) == len(frames) * (1152 if rate > 24_000 else 576)
    np.testing.assert_allclose(wave.samples, decoded(b"".join(frames)), atol=2e-4)
    # LAME's delay is 576 samples, and a decoder's 529.
    late = wave.samples[1105:][: len(expected)]
    np.testing.assert_allclose(late, expected[: len(late)], atol=1e-4)


@pytest.mark.parametrize("rate", [48_000, 16_000])
def test_what_libsndfile_reads_to_the_end_has_the_same_bits(tmp_path, rate):
    # For one bit rate and no tag, its estimate from the file's size is right.
    frames = b"".join(bare(rate, 1, "CONSTANT"))
    sizes = {len(frame) for frame in bare(rate, 1, "CONSTANT")}
    expected = soundfile.read(io.BytesIO(frames), dtype="float32")[0]
    assert len(sizes) == 1
    np.testing.assert_array_equal(read(tmp_path, ID3 + frames).samples, expected)


def test_a_segment_is_a_slice_of_an_mp3_without_an_info_frame(tmp_path):
    whole = read(tmp_path, b"".join(bare())).samples
    for start, end in ((0.0, 0.2), (0.31, 0.53), (0.5, -1)):
        last = None if end == -1 else int(end * 16_000)
        found = read_wave(str(tmp_path / "x.mp3"), start, end).samples
        np.testing.assert_array_equal(found, whole[int(start * 16_000) : last])


# --- data around the frames -----------------------------------------------------------------------


def id3(body: bytes, footer: bool = False) -> bytes:
    size = bytes(len(body) >> shift & 127 for shift in (21, 14, 7, 0))
    head = b"ID3\x04\0" + (b"\x10" if footer else b"\0") + size
    return head + body + (b"3DI" + head[3:] if footer else b"")


APE = b"APETAGEX" + (2000).to_bytes(4, "little") + (32 + 4).to_bytes(4, "little")
APE = (head := APE + bytes(4) + b"\0\0\0\xa0" + bytes(8)) + b"\xff\xfb\x54\xc0" + head
TAGS = {
    "ID3v2": (id3(bytes(300)), b""),
    "frames in ID3v2": (id3(bytes.fromhex("fffb54c0").ljust(192, b"\0") * 5), b""),
    "ID3v2 with a footer": (id3(bytes(50), footer=True), b""),
    "two ID3v2": (id3(bytes(30)) + id3(bytes(200)), b""),
    "ID3v1": (b"", b"TAG\xff\xfb\x54\xc0".ljust(128, b"\0")),
    "APE": (b"", APE),
    "APE and ID3v1": (b"", APE + b"TAG".ljust(128, b" ")),
    "Lyrics3": (b"", b"LYRICSBEGIN" + b"x" * 9 + b"000020LYRICS200" + b"TAG".ljust(128, b"\0")),
    "zeros": (bytes(700), bytes(700)),
    "text": (b"no audio here", b"nor here"),
}


@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("info", [True, False])
def test_what_is_before_and_behind_the_frames_changes_nothing(tmp_path, tags, info):
    raw = encoded() if info else b"".join(bare())
    before, behind = TAGS[tags]
    expected = read(tmp_path, raw).samples
    np.testing.assert_array_equal(read(tmp_path, before + raw + behind).samples, expected)


JOINTS = {
    "ID3v1": b"TAG".ljust(128, b"\xff"),
    "ID3v2": ID3,
    "frames in ID3v2": TAGS["frames in ID3v2"][0],
    "ID3v1 and ID3v2": b"TAG".ljust(128, b"\0") + id3(bytes(300)),
    "APE": APE,
    "Lyrics3": TAGS["Lyrics3"][1],
    "zeros and tags": bytes(500) + APE + ID3 + bytes(80),
    "a few bytes": b"\xff\xfb\x90" * 4,
}


@pytest.mark.parametrize("joint", JOINTS)
def test_tags_between_frames_are_left_out(tmp_path, joint):
    frames = bare()
    expected = read(tmp_path, b"".join(frames)).samples
    raw = b"".join(frames[:9]) + JOINTS[joint] + b"".join(frames[9:])
    np.testing.assert_array_equal(read(tmp_path, raw).samples, expected)


@pytest.mark.parametrize(
    "junk",
    [b"\0" * 77, b"\xff" * 41, b"\xff\xfb\x90" * 30, b"TAG" * 50, bytes(5000) + ID3, b"ID3" * 20],
)
def test_other_bytes_between_frames_are_damage(tmp_path, junk):
    frames = bare()
    with pytest.raises(AudioError, match=r"damaged: \d+ bytes between frames") as caught:
        read(tmp_path, b"".join(frames[:9]) + junk + b"".join(frames[9:]))
    assert caught.value.reason == "unreadable audio"


def test_a_hole_is_damage_wherever_it_is(tmp_path):
    # Frames of 72 bytes that differ.
    frames = [frame[:40] + bytes([n]) * 32 for n, frame in enumerate([silent_mp3(0.072)] * 200, 1)]
    raw = b"".join(frames)
    for lost in (10, 50, 72 * 3 + 10):
        for place in (72 * 20, 72 * 20 + 30):
            with pytest.raises(AudioError, match=r"damaged: \d+ bytes between frames"):
                read(tmp_path, raw[:place] + raw[place + lost :])
    for begin, end in ((1000, 1200), (1000, 9000), (72 * 20, 72 * 40), (9000, len(raw))):
        zeroed = raw[:begin] + bytes(end - begin) + raw[end:]
        for tag in (b"", b"TAG".ljust(128, b"\0")):
            with pytest.raises(AudioError, match=r"damaged: \d+ bytes"):
                read(tmp_path, zeroed + tag)
    with pytest.raises(AudioError, match="damaged: 72 bytes after the last frame"):
        read(tmp_path, raw + b"x" * 72)


def test_a_header_of_free_format_between_frames_ends_nothing(tmp_path):
    header = bytes.fromhex("ffe308c0")
    for end in (b"", silent_mp3(1)):
        expected = read(tmp_path, silent_mp3(1) + end).samples
        np.testing.assert_array_equal(
            read(tmp_path, silent_mp3(1) + header + end).samples, expected
        )
        with pytest.raises(AudioError, match="damaged"):
            read(tmp_path, silent_mp3(1) + header.ljust(144, b"x") + end)


@pytest.mark.parametrize(("frames", "lost"), [(1, 0), (1, 5), (2, 0), (2, 5), (9, 0), (9, 5)])
@pytest.mark.parametrize("tag", [b"", b"TAG".ljust(128, b"\0") + ID3])
def test_frames_of_another_kind_at_the_end_are_told(tmp_path, frames, lost, tag):
    other = bytes.fromhex("fff348c0").ljust(144, b"x") * frames
    # After a tag, a partial frame may be anything.
    said = "damaged: 139 bytes" if tag and (frames, lost) == (1, 5) else "sample rate .* changes"
    with pytest.raises(AudioError, match=said):
        read(tmp_path, silent_mp3(1) + tag + other[: len(other) - lost])


def test_joined_files_are_read_to_their_end(tmp_path):
    frames = len(bare())
    twice = read(tmp_path, encoded() + encoded()).samples
    assert len(twice) == 2 * frames * 576
    tagged = ID3 + encoded() + b"TAG".ljust(128, b"\0")
    np.testing.assert_array_equal(read(tmp_path, tagged + tagged).samples, twice)


# --- reported lengths -----------------------------------------------------------------------------


def lead(told: int | None, name: bytes = b"Xing") -> bytes:
    """Return a frame like the others (16 kHz, mono, 64 kbit/s) that reports their number."""
    head = bytes.fromhex("fff388c0")
    if name == b"VBRI":
        content = head + bytes(32) + name + bytes(10) + told.to_bytes(4, "big")
    else:
        flag = b"\0\0\0\1" if told is not None else bytes(4)
        content = head + bytes(9) + name + flag + (told or 0).to_bytes(4, "big")
    return content.ljust(288, b"\0")


@pytest.mark.parametrize("name", [b"Info", b"Xing", b"VBRI"])
def test_as_many_frames_as_are_told_or_more(tmp_path, name):
    frames = bare()
    expected = read(tmp_path, b"".join(frames)).samples
    # A count that includes this frame is one too large; some encoders' VBRI frames do that.
    for told in (len(frames), len(frames) - 3, 1, *[len(frames) + 1] * (name == b"VBRI")):
        found = read(tmp_path, lead(told, name) + b"".join(frames)).samples
        assert len(found) >= len(expected) - 529
        if name == b"VBRI" or told != len(frames):
            np.testing.assert_array_equal(found, expected)
    for told in (len(frames) + 2, 10**6, 2**32 - 1):
        with pytest.raises(AudioError, match=f"cut off: {len(frames)} frames of {told}"):
            read(tmp_path, lead(told, name) + b"".join(frames))


def test_an_info_frame_that_tells_no_number_is_left_out(tmp_path):
    expected = read(tmp_path, b"".join(bare())).samples
    found = read(tmp_path, lead(None) + b"".join(bare())).samples
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_a_cut_is_seen_but_between_frames_of_a_file_that_tells_no_number(
    tmp_path_factory, data, tell
):
    folder, frames = tmp_path_factory.getbasetemp(), bare()
    raw = encoded() if tell else b"".join(frames)
    place = data.draw(st.integers(1, len(raw) - 1))
    ends = np.cumsum([len(frame) for frame in frames])
    # Between frames of a file without a count, it cannot.
    if not tell and place in ends[1:]:
        assert len(read(folder, raw[:place]).samples) == 576 * (1 + list(ends).index(place))
    else:
        with pytest.raises(AudioError) as caught:
            read(folder, raw[:place])
        assert caught.value.reason == "unreadable audio"


@pytest.mark.parametrize("lost", [1, 2, 30, 71])
def test_the_last_frame_has_to_be_whole(tmp_path, lost):
    with pytest.raises(AudioError, match=f"cut off: {72 - lost} bytes of"):
        read(tmp_path, silent_mp3(1)[:-lost])
    with pytest.raises(AudioError, match="cut off"):
        read(tmp_path, ID3 + silent_mp3(1)[:-lost] + b"TAG".ljust(128, b"\0"))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (bytes.fromhex("fffb04c0").ljust(200, b"\0") * 9, "free format"),
        (bytes.fromhex("fffd84c0").ljust(384, b"\0") * 9, "not audio"),
        (silent_mp3(1) + bytes.fromhex("fff348c0").ljust(144, b"\0") * 9, "sample rate"),
        (lead(3), "cut off within|no frame|not audio"),
        (silent_mp3(1)[:50], "first frame"),
        (b"\xff" * 5000, "not audio"),
        (b"ID3\x04\0\0\0\0\0\x23", "not audio"),
        (b"\xff", "not audio"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, raw, said):
    with pytest.raises(AudioError, match=said):
        read(tmp_path, raw)


# --- arbitrary input ------------------------------------------------------------------------------

PIECES = [
    *(bytes.fromhex(header) for header, *_ in FRAMES),
    *(
        b"ID3\x04\0\0\0\0\x01\x00",
        b"TAG",
        b"APETAGEX",
        b"000020LYRICS200",
        b"Xing\0\0\0\1",
        b"VBRI",
    ),
]


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 9_000), st.binary(max_size=9) | st.sampled_from(PIECES))),
    st.integers(1, 9_000),
)
def test_changed_bytes_give_audio_or_one_error(changes, length):
    raw = bytearray(ID3 + encoded() + b"".join(bare()))
    for place, piece in changes:
        raw[place : place + len(piece)] = piece
    try:
        stream = read_stream(bytes(raw[:length]))
    except MpegError:
        return
    found = miniaudio.mp3_get_info(stream.raw)
    assert stream.frames > 0 and found.num_frames > 0


@pytest.mark.parametrize(
    "piece", [*PIECES, b"\xff", b"\xff\xfb", b"\xff\xfb\x90\0\xff\xf3\x48\xc0", b"\xff\xfb\x04\xc0"]
)
def test_whatever_is_repeated_takes_little_time(piece):
    raw = piece * (200_000 // len(piece))
    begin = time.process_time()
    for content in (raw, silent_mp3(1) + raw, raw + silent_mp3(1)):
        with suppress(MpegError):
            read_stream(content)
    assert time.process_time() - begin < 5
