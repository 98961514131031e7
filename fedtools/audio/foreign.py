"""Names of formats that are often taken for audio that can be read, by a file's first bytes."""

from __future__ import annotations

# Offset of a mark, the mark, and the format's name.
_MARKS = (
    (4, b"ftyp", "an MPEG-4 file (m4a, mp4)"),
    (0, b"\x1a\x45\xdf\xa3", "a WebM or Matroska file"),
    (0, b"\x30\x26\xb2\x75", "a Windows Media file (wma)"),
    (0, b"#!AMR", "an AMR file"),
    (0, b"caff", "a Core Audio file (caf)"),
    (0, b"MAC ", "a Monkey's Audio file (ape)"),
    (0, b"wvpk", "a WavPack file"),
    (0, b"ajkg", "a file of shorten"),
    (0, b".RMF", "a RealMedia file"),
    (0, b"DSD ", "a DSD file"),
    (0, b"\xff\xf1", "an AAC stream"),
    (0, b"\xff\xf9", "an AAC stream"),
    (0, b"FLV\x01", "a Flash video"),
    (0, b"Creative Voice File", "a VOC file"),
)


def foreign_format(head: bytes) -> str:
    """Return the name of a known format that is not read, with its article; "" for others."""
    return next((name for at, mark, name in _MARKS if head[at : at + len(mark)] == mark), "")
