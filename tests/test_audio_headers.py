"""Lengths of recordings by their headers, in every format but MP3: intact, cut off, and wrong."""

from __future__ import annotations

import io
import struct
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.audio.wave import AudioError, Wave, describe_recording, read_wave

RATE = 16_000
COUNT = 20_001
SAMPLES = (np.random.default_rng(3).standard_normal((COUNT, 2)) * 3000).astype(np.int16)
# Formats that libsndfile writes, and their bytes per sample and channel.
FORMATS = {
    "wav": ("WAV", "PCM_16", 2),
    "wav24": ("WAV", "PCM_24", 3),
    "wavex": ("WAVEX", "PCM_16", 2),
    "rf64": ("RF64", "PCM_16", 2),
    "w64": ("W64", "PCM_16", 2),
    "mulaw": ("WAV", "ULAW", 1),
    "aiff": ("AIFF", "PCM_16", 2),
    "aifc": ("AIFF", "ALAW", 1),
    "au": ("AU", "PCM_16", 2),
    "sphere": ("NIST", "PCM_16", 2),
    "flac": ("FLAC", "PCM_16", 0),
    "flac24": ("FLAC", "PCM_24", 0),
    "vorbis": ("OGG", "VORBIS", 0),
    "opus": ("OGG", "OPUS", 0),
}
CHUNKS = ["wav", "wav24", "wavex", "rf64", "mulaw", "aiff", "aifc"]


@cache
def encoded(name: str, channels: int = 1) -> bytes:
    kind, subtype, _ = FORMATS[name]
    file = io.BytesIO()
    soundfile.write(file, SAMPLES[:, :channels], RATE, format=kind, subtype=subtype)
    return file.getvalue()


def read(folder: Path, raw: bytes) -> Wave:
    (folder / "x.audio").write_bytes(raw)
    wave = read_wave(str(folder / "x.audio"))
    seconds, channels = describe_recording(str(folder / "x.audio"))
    assert (seconds, channels) == (len(wave.samples) / wave.rate, wave.channels)
    return wave


def refused(folder: Path, raw: bytes, said: str) -> None:
    with pytest.raises(AudioError, match=said) as caught:
        read(folder, raw)
    assert caught.value.reason in ("unreadable audio", "empty file")


# --- intact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("channels", [1, 2])
def test_all_samples_of_a_whole_file_are_read(tmp_path, name, channels):
    wave = read(tmp_path, encoded(name, channels))
    # For an odd number of bytes in an AIFF, libsndfile counts the padding byte as audio.
    count = COUNT + (name == "aifc" and channels == 1)
    assert (len(wave.samples), wave.rate, wave.channels) == (count, RATE, channels)
    expected = SAMPLES[:, :channels].mean(axis=1) / 32768
    lossy = name in ("vorbis", "opus", "mulaw", "aifc")
    if lossy:
        assert np.corrcoef(wave.samples[:COUNT], expected)[0, 1] > 0.8
    else:
        np.testing.assert_allclose(wave.samples, expected, atol=1e-7)
    found = read_wave(str(tmp_path / "x.audio"), 0.25, 0.75).samples
    np.testing.assert_array_equal(found, wave.samples[4000:12000])


# --- cut off --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path, name):
    raw = encoded(name)
    # An odd number of bytes is padded.
    audio = len(raw) - (name in CHUNKS and FORMATS[name][2] % 2)
    for place in (3, 30, 200, len(raw) // 3, len(raw) // 2, audio - 1000, audio - 2, audio - 1):
        refused(tmp_path, raw[:place], "cut off|not audio|damaged|no .* chunk|STREAMINFO|no bytes")


@settings(max_examples=100)
@given(st.sampled_from(list(FORMATS)), st.data())
def test_a_cut_never_gives_other_samples(tmp_path_factory, name, data):
    folder, raw = tmp_path_factory.getbasetemp(), encoded(name)
    place = data.draw(st.integers(1, len(raw) - 1))
    try:
        found = read(folder, raw[:place]).samples
    except AudioError:
        return
    # The padding byte was lost.
    assert place == len(raw) - 1 and name in CHUNKS and FORMATS[name][2] % 2
    np.testing.assert_array_equal(found, read(folder, raw).samples)


@settings(max_examples=200)
@given(
    st.sampled_from(list(FORMATS)),
    st.lists(st.tuples(st.integers(0, 120), st.binary(min_size=1, max_size=4)), max_size=3),
    st.integers(100, 60_000),
)
def test_changed_headers_give_audio_or_one_error(tmp_path_factory, name, changes, length):
    raw = bytearray(encoded(name, 2))
    for place, piece in changes:
        raw[place : place + len(piece)] = piece
    try:
        wave = read(tmp_path_factory.getbasetemp(), bytes(raw[:length]))
    except AudioError:
        return
    assert len(wave.samples) <= 4 * COUNT


# --- wrong headers --------------------------------------------------------------------------------


def chunk_of(name: str, raw: bytes) -> int:
    """Return the position of the audio chunk's length."""
    return raw.index(b"SSND" if name.startswith("aif") else b"data") + 4


def with_length(name: str, change: int) -> bytes:
    """Return a file whose header changes the length of its audio chunk and of the whole."""
    raw, order = bytearray(encoded(name)), ">" if name.startswith("aif") else "<"
    places = [(4, "I"), (chunk_of(name, raw), "I")]
    if name == "rf64":
        places = [(20, "Q"), (28, "Q")]
    for place, kind in places:
        (length,) = struct.unpack_from(order + kind, raw, place)
        struct.pack_into(order + kind, raw, place, length + change)
    return bytes(raw)


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_that_tell_another_length_are_refused(tmp_path, name):
    width = FORMATS[name][2]
    for change in (2 * width, 1000 * width, 1_000_000 * width):
        refused(tmp_path, with_length(name, change), "cut off")
    for change in (-1000 * width, -10_000 * width):
        refused(tmp_path, with_length(name, change), "its header reports")


@pytest.mark.parametrize("name", ["wav", "aiff"])
def test_chunks_behind_the_audio_are_left_out(tmp_path, name):
    order = ">" if name == "aiff" else "<"
    raw = bytearray(encoded(name))
    raw += (
        b"LIST" + struct.pack(order + "I", 5) + b"words\0" + b"id3 " + struct.pack(order + "I", 4)
    )
    raw += b"more"
    struct.pack_into(order + "I", raw, 4, len(raw) - 8)
    for end in (b"", bytes(300), b"TAG".ljust(128, b"\0")):
        assert len(read(tmp_path, bytes(raw) + end).samples) == COUNT


@pytest.mark.parametrize("unknown", [0, 0xFFFF_FFFF, 0x7FFF_FFFF, 0x7FFF_F000])
def test_a_wav_that_was_written_into_a_pipe_is_read_to_its_end(tmp_path, unknown):
    raw = bytearray(encoded("wav"))
    struct.pack_into("<I", raw, 4, unknown)
    struct.pack_into("<I", raw, chunk_of("wav", raw), unknown)
    assert len(read(tmp_path, bytes(raw)).samples) == COUNT


def patched(raw: bytes, *fields: tuple[int, bytes]) -> bytes:
    """Return the file with other fields at some positions."""
    changed = bytearray(raw)
    for place, field in fields:
        changed[place : place + len(field)] = field
    return bytes(changed)


def test_a_length_that_was_never_written_is_not_known(tmp_path):
    wav, rf64, aiff, w64, au = (encoded(name) for name in ("wav", "rf64", "aiff", "w64", "au"))
    sound, count = aiff.index(b"SSND") + 4, aiff.index(b"COMM") + 10
    unknown = [
        patched(wav, (40, bytes(4))),
        patched(wav, (4, bytes(4)), (40, bytes(4))),
        patched(rf64, (20, bytes(16))),
        patched(aiff, (sound, bytes(4))),
        patched(aiff, (sound, bytes(4)), (count, bytes(4))),
        patched(aiff, (4, bytes(4)), (sound, b"\0\0\0\x08"), (count, bytes(4))),
        patched(au, (8, bytes(4))),
        patched(au, (8, b"\xff" * 4)),
        *(
            patched(w64, (w64.index(b"data") + 16, n.to_bytes(8, "little")))
            for n in (0, 24, 2**63 - 1)
        ),
    ]
    for raw in unknown:
        np.testing.assert_array_equal(
            read(tmp_path, raw).samples, SAMPLES[:, 0] / np.float32(32768)
        )
    # No audio is an error, whatever follows; a recorder may have recorded silence.
    for end, found in ((b"", 0), (b"LIST\x06\0\0\0INFOxy", 0), (bytes(2000), 1000)):
        assert len(read(tmp_path, patched(wav, (40, bytes(4)))[:44] + end).samples) == found


@pytest.mark.parametrize("name", ["w64", "au"])
def test_w64_and_au_that_tell_another_length_are_refused(tmp_path, name):
    raw = encoded(name)
    place, size, order = (raw.index(b"data") + 16, 8, "little") if name == "w64" else (8, 4, "big")
    told = int.from_bytes(raw[place : place + size], order)
    filled = raw + bytes(-len(raw) % 8 if name == "w64" else 0)
    for change, said in ((2, "cut off"), (10**6, "cut off"), (-2000, "its header reports")):
        field = (told + change).to_bytes(size, order)
        refused(tmp_path, patched(raw, (place, field)), said)
    for end in (bytes(300), b"TAG".ljust(128, b"\0")):
        assert len(read(tmp_path, filled + end).samples) == COUNT
    if name == "w64":
        chunk = b"levl" + raw[place - 12 : place] + (40).to_bytes(8, "little") + bytes(range(16))
        assert len(read(tmp_path, filled + chunk).samples) == COUNT
    refused(tmp_path, filled + b"junkjunk" * 9, "its header reports")


@pytest.mark.parametrize("name", FORMATS)
def test_a_tag_of_an_mp3_before_any_format_is_left_out(tmp_path, name):
    tag = b"ID3\x04\0\0\0\0\0\x0a" + bytes(10)
    expected = read(tmp_path, encoded(name)).samples
    np.testing.assert_array_equal(read(tmp_path, tag + encoded(name)).samples, expected)
    found = read_wave(str(tmp_path / "x.audio"), 0.25, 0.75).samples
    np.testing.assert_array_equal(found, expected[4000:12000])
    refused(tmp_path, (tag + encoded(name))[:-1000], "cut off|damaged")


def test_the_count_of_samples_of_an_aiff_is_compared(tmp_path):
    raw = encoded("aiff")
    place = raw.index(b"COMM") + 10
    for told, said in ((COUNT + 1, "cut off"), (COUNT - 1, "reports"), (0, "reports")):
        changed = raw[:place] + struct.pack(">I", told) + raw[place + 4 :]
        refused(tmp_path, changed, said)


def test_the_count_of_samples_of_a_sphere_is_compared(tmp_path):
    raw = encoded("sphere")
    told = f"sample_count -i {COUNT}".encode()
    assert raw.count(told) == 1
    for change, said in ((1, "cut off"), (5000, "cut off"), (-5000, "reports")):
        other = f"sample_count -i {COUNT + change}".encode().ljust(len(told))
        refused(tmp_path, raw.replace(told, other), said)
    # The padding of the last block of 1,024 bytes is not audio.
    filled = raw + bytes(1024 - len(raw) % 1024)
    assert len(read(tmp_path, filled).samples) == COUNT
    np.testing.assert_array_equal(read(tmp_path, filled).samples, read(tmp_path, raw).samples)


@pytest.mark.parametrize("name", ["flac", "flac24"])
def test_the_count_of_samples_of_a_flac_is_compared(tmp_path, name):
    raw = encoded(name)
    # RFC 9639, 8.2: the lowest 36 of the 64 bits from the 18th byte on.
    (word,) = struct.unpack_from(">Q", raw, 18)
    assert word & (2**36 - 1) == COUNT
    for told, said in (
        (COUNT + 1, "cut off"),
        (10**9, "cut off"),
        (COUNT - 1, "reports"),
        (1, "reports"),
    ):
        refused(tmp_path, raw[:18] + struct.pack(">Q", word - COUNT + told) + raw[26:], said)
    # 0 means an unknown length: written into a pipe.
    piped = raw[:18] + struct.pack(">Q", word - COUNT) + raw[26:]
    np.testing.assert_array_equal(read(tmp_path, piped).samples, SAMPLES[:, 0] / np.float32(32768))
    refused(tmp_path, piped[:-100], "cut off|damaged")


@pytest.mark.parametrize("name", ["vorbis", "opus"])
def test_an_ogg_without_its_last_page_is_refused(tmp_path, name):
    raw = encoded(name)
    last = raw.rindex(b"OggS")
    assert raw.count(b"OggS") > 3 or name == "vorbis"
    refused(tmp_path, raw[:last], "cut off: no page that ends the stream")
    refused(tmp_path, raw[: last + 20], "cut off: the last page is incomplete")


OTHERS = {
    "m4a": (b"\0\0\0\x20ftypM4A \0\0\0\0", "MPEG-4"),
    "webm": (b"\x1a\x45\xdf\xa3\x9f\x42\x86\x81\x01webm", "WebM"),
    "wma": (bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"), "Windows Media"),
    "amr": (b"#!AMR\n<", "AMR"),
    "aac": (bytes.fromhex("fff15080"), "AAC"),
    "ape": (b"MAC \x96\x0f", "Monkey's Audio"),
    "wavpack": (b"wvpk\0\0", "WavPack"),
    "shorten": (b"ajkg\2", "shorten"),
}


@pytest.mark.parametrize("name", [*OTHERS, "caf", "voc"])
@pytest.mark.parametrize("tag", [b"", b"ID3\x04\0\0\0\0\0\0"], ids=["plain", "tagged"])
def test_other_formats_are_refused_by_name_with_a_command(tmp_path, name, tag):
    """Whatever the name of the file: a WebM is often named .ogg."""
    if name in OTHERS:
        raw, said = OTHERS[name]
        raw = raw.ljust(3000, b"\1")
    else:
        file, said = io.BytesIO(), {"caf": "Core Audio", "voc": "VOC"}[name]
        soundfile.write(file, SAMPLES[:, 0], RATE, format=name.upper(), subtype="PCM_16")
        raw = file.getvalue()
    refused(tmp_path, tag + raw, f"{said}.*not read; convert it, as with: ffmpeg -i ")


def test_what_is_of_no_format_is_told_what_is_read(tmp_path):
    refused(tmp_path, bytes(3000), "neither WAV, W64, AIFF, AU, FLAC, MP3, SPHERE nor Ogg")


def test_a_pointer_of_git_lfs_is_told(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
    refused(tmp_path, pointer, "a Git LFS pointer, not the file itself; run .*git lfs pull")


def _bw64(long: bool) -> bytes:
    """Return what ITU-R BS.2088 calls a file: RF64's chunks, or WAV's with a reserve for them."""
    raw = encoded("rf64" if long else "wav")
    if not long:
        raw = raw[:12] + b"JUNK" + (28).to_bytes(4, "little") + bytes(28) + raw[12:]
    return b"BW64" + raw[4:]


@pytest.mark.parametrize("long", [True, False])
def test_bw64_is_read_as_rf64(tmp_path, long):
    expected = read(tmp_path, encoded("wav"))
    found = read(tmp_path, _bw64(long))
    np.testing.assert_array_equal(found.samples, expected.samples)
    for end in (100, 5000, len(_bw64(long)) - 2):
        refused(tmp_path, _bw64(long)[:end], "cut off|no data chunk")


CODECS = [
    (kind, subtype)
    for kind in ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "NIST", "FLAC")
    for subtype in soundfile.available_subtypes(kind)
    # libsndfile reads neither layer III within a WAV nor DWVW from an opened file.
    if soundfile.check_format(kind, subtype) and not subtype.startswith(("MPEG", "DWVW"))
]


@pytest.mark.parametrize(("kind", "subtype"), CODECS)
def test_a_segment_is_a_slice_whatever_the_codec(tmp_path, kind, subtype):
    """Telephone speech is WAV by its name, but GSM, G.721 and NMS ADPCM cannot seek."""
    path = tmp_path / "call.audio"
    samples = (0.2 * np.sin(np.arange(32_000) / 5)).astype("f4")
    soundfile.write(path, samples, 8000, format=kind, subtype=subtype)
    whole = read_wave(str(path)).samples
    for begin, end in ((0, 1), (1, 2), (2.5, 3.125), (3, -1)):
        found = read_wave(str(path), begin, end).samples
        expected = whole[int(begin * 8000) : None if end == -1 else int(end * 8000)]
        np.testing.assert_array_equal(found, expected)
