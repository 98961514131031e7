#!/usr/bin/env python3
"""A small Common Voice, spoken by espeak-ng, in the layout of release 17 and later.

    mini.py OUT

writes OUT/cv-corpus-mini/en/{clips/*.mp3,validated.tsv,train.tsv,dev.tsv,test.tsv,
clip_durations.tsv} and OUT/cv-corpus-mini/SHA256SUMS: 100 speakers of six accents (see voices.py),
about two hours. Ten speakers each have the accents of Australia, England and India, and
say 40 sentences; seventy have the accents of the United States, Scotland and the West Indies, and
say 30.

The sentences come from a small grammar, and no two are the same. Its words are chosen such that
an accent matters: they come in groups that differ by the one sound that the accents move.

The same seed gives the same bytes on the same machine. A second run checks every file by its hash
and makes what is missing or damaged; so does the run after one that was killed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256 as hash_of
from pathlib import Path

import voices
from voices import RATE, Speaker, make_speaker, random_of

from fedtools.files.atomic import atomic_path, sha256, write_text
from fedtools.files.errors import UserError

# Speakers of each accent, and sentences of each speaker.
SPEAKERS = {
    "au": (10, 40),
    "en": (10, 40),
    "in": (10, 40),
    "us": (36, 30),
    "scotland": (20, 30),
    "bermuda": (14, 30),
}
COLUMNS = (
    "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents "
    "variant locale segment"
).split()
# Groups that an accent moves into each other: pan pen pin (raised front vowels), bay boy, tail
# tile (FACE and PRICE), coat goat, pot bought (breath), vest west, wine vine (v and w), cart cot
# cat (START), three free tree, hat at (h), ship sheep, ...
WORDS = {
    "D": "the my his this",
    "A": "red big bad dark wet white fine free thin",
    "N": (
        "pen pin pan pine bed bay boy bell bill ball tail tile lake ship sheep shop coat goat kite "
        "gate vest vine wine veil whale cat cart cot cut hat heart hut hen dog man men road rod "
        "pot port park pack path bath grass glass tree"
    ),
    "V": "saw sold left let lit hid met took",
    "C": "two three four five nine ten",
    "P": "by near in under past",
}
TEMPLATES = (
    "D A N V D N",
    "C A N P D N",
    "D N and C N P D N",
    "V D N C P D A N",
    "D N is A and not A",
)
"""Capitals stand for one of WORDS, the rest for itself."""


@dataclass(frozen=True)
class Clip:
    """One utterance of the corpus that is to be made."""

    name: str
    speaker: Speaker
    sentence: str
    part: str

    def row(self) -> str:
        """The line of validated.tsv."""
        sentence_id = hash_of(self.sentence.encode()).hexdigest()
        spoken = self.sentence.capitalize() + "."
        speaker = self.speaker
        cells = [speaker.client_id, self.name, sentence_id, spoken, "", "2", "0", speaker.age]
        return "\t".join([*cells, speaker.gender, speaker.accent.text, "", "en", ""])


def sentences(seed: int) -> Iterator[str]:
    """Yield sentences of the grammar, no two the same."""
    random = random_of(seed, "sentences")
    choices = {kind: words.split() for kind, words in WORDS.items()}
    seen: set[str] = set()
    while True:
        template = TEMPLATES[random.integers(len(TEMPLATES))].split()
        sentence = " ".join(str(random.choice(choices.get(word, [word]))) for word in template)
        if sentence not in seen:
            seen.add(sentence)
            yield sentence


def plan(seed: int, most: int) -> list[Clip]:
    """The clips of the corpus, at most so many of a speaker.

    Two speakers of each accent are in test.tsv, and two in dev.tsv.
    """
    source = sentences(seed)
    clips = []
    for accent, (count, each) in SPEAKERS.items():
        for number in range(count):
            speaker = make_speaker(accent, number, seed)
            part = "test" if number >= count - 2 else "dev" if number >= count - 4 else "train"
            for _ in range(min(each, most)):
                name = f"common_voice_en_{40000000 + len(clips)}.mp3"
                clips.append(Clip(name, speaker, next(source), part))
    return clips


def make_clips(clips: list[Clip], folder: Path, results) -> None:
    """Speak clips and send each one's (name, sha256), or what went wrong, through a connection."""
    import soundfile

    try:
        synthesiser = voices.Synthesiser()
        for clip in clips:
            wave = synthesiser.speak(clip.sentence, clip.speaker, clip.name)
            with atomic_path(folder / clip.name) as path:
                soundfile.write(
                    str(path),
                    wave,
                    RATE,
                    format="MP3",
                    subtype="MPEG_LAYER_III",
                    bitrate_mode="CONSTANT",
                    compression_level=0.85,
                )
            results.send((clip.name, sha256(folder / clip.name)))
    except BrokenPipeError:
        pass  # the run that wanted these clips is gone
    except Exception as error:
        with suppress(BrokenPipeError):
            results.send(f"{type(error).__name__}: {error}")
    results.close()


def make_missing(clips: list[Clip], folder: Path, jobs: int) -> Iterator[tuple[str, str]]:
    """Make clips in parallel processes and yield the (name, sha256) of each as it is ready."""
    context = multiprocessing.get_context("fork")
    waiting = []
    for job in range(jobs):
        receiving, sending = context.Pipe(duplex=False)
        arguments = clips[job::jobs], folder, sending
        context.Process(target=make_clips, args=arguments, daemon=True).start()
        sending.close()
        waiting.append(receiving)
    done = 0
    while waiting:
        for connection in multiprocessing.connection.wait(waiting):
            try:
                result = connection.recv()
            except EOFError:
                waiting.remove(connection)
                continue
            if isinstance(result, str):
                raise UserError(f"cannot make a clip: {result}", remedy="see utils/setup.sh")
            yield result
            done += 1
            if done % 200 == 0 or done == len(clips):
                print(f"made {done} of {len(clips)} clips", file=sys.stderr)
    if done < len(clips):
        raise UserError(f"{len(clips) - done} clips were not made", remedy="run it again")


def read_sums(path: Path) -> dict[str, str]:
    """Read name -> sha256 as `sha256sum` writes it; a line that was cut off is left out."""
    sums = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            digest, _, name = line.partition("  ")
            if len(digest) == 64 and name:
                sums[name] = digest
    return sums


def is_whole(path: Path, digest: str | None) -> bool:
    """Whether a file is there with that hash."""
    return path.is_file() and sha256(path) == digest


def write_tables(clips: list[Clip], language: Path) -> None:
    """Write validated.tsv, the three splits and clip_durations.tsv."""
    import soundfile

    header = "\t".join(COLUMNS)
    ordered = sorted(clips, key=lambda clip: (clip.speaker.client_id, clip.name))
    for table in ("validated", "train", "dev", "test"):
        rows = [clip.row() for clip in ordered if table in ("validated", clip.part)]
        write_text(language / f"{table}.tsv", "\n".join([header, *rows]) + "\n")
    lines = ["clip\tduration[ms]"]
    for clip in clips:
        seconds = soundfile.info(str(language / "clips" / clip.name)).duration
        lines.append(f"{clip.name}\t{round(1000 * seconds)}")
    write_text(language / "clip_durations.tsv", "\n".join(lines) + "\n")


def claim(corpus: Path, recipe: str) -> None:
    """Make the folder ours; one that another seed or version made is emptied."""
    mark = corpus / ".recipe"
    if mark.exists() and mark.read_text(encoding="utf-8") != recipe:
        shutil.rmtree(corpus)
    elif corpus.exists() and not mark.exists() and any(corpus.iterdir()):
        raise UserError("was not made by this script", path=corpus, remedy="choose another OUT")
    (corpus / "en" / "clips").mkdir(parents=True, exist_ok=True)
    for left_by_a_kill in corpus.rglob(".*.tmp"):
        left_by_a_kill.unlink(missing_ok=True)
    write_text(mark, recipe)


def recipe_of(seed: int, most: int) -> str:
    """What decides the bytes of the corpus: the arguments, this code, and the two libraries."""
    import espeakng_loader
    import soundfile

    parts = [f"seed {seed}", f"most {most}", soundfile.__libsndfile_version__]
    files = (Path(__file__), Path(voices.__file__), Path(espeakng_loader.get_library_path()))
    return "\n".join([*parts, *(sha256(path) for path in files)]) + "\n"


def make(out: Path, seed: int, most: int, jobs: int) -> None:
    """Make the corpus, or what of it is missing or damaged."""
    corpus = out / "cv-corpus-mini"
    language = corpus / "en"
    claim(corpus, recipe_of(seed, most))
    final, partial = corpus / "SHA256SUMS", corpus / ".sums"
    sums = {**read_sums(final), **read_sums(partial)}
    clips = plan(seed, most)
    names = {clip.name: f"en/clips/{clip.name}" for clip in clips}
    missing = [
        clip
        for clip in clips
        if not is_whole(corpus / names[clip.name], sums.get(names[clip.name]))
    ]
    tables = [f"en/{name}.tsv" for name in ("validated", "train", "dev", "test", "clip_durations")]
    if not missing and all(is_whole(corpus / name, sums.get(name)) for name in tables):
        print(f"{corpus}: {len(clips)} clips are there and whole", file=sys.stderr)
        return
    print(f"{corpus}: making {len(missing)} clips with espeak-ng", file=sys.stderr)
    with open(partial, "a", encoding="utf-8") as file:
        for name, digest in make_missing(missing, language / "clips", min(jobs, len(missing))):
            sums[names[name]] = digest
            file.write(f"{digest}  {names[name]}\n")
            file.flush()
    write_tables(clips, language)
    sums.update({name: sha256(corpus / name) for name in tables})
    write_text(final, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
    partial.unlink()


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    parser = argparse.ArgumentParser(description="Make a small Common Voice with espeak-ng.")
    parser.add_argument("out", type=Path, help="cv-corpus-mini is made in this folder")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another corpus")
    most = "at most so many sentences of each speaker, for a smaller corpus"
    parser.add_argument("--utterances", dest="most", type=int, default=40, metavar="N", help=most)
    jobs = os.cpu_count() or 1
    parser.add_argument("--nj", type=int, default=jobs, help=f"processes (default: {jobs})")
    options = parser.parse_args()
    if options.nj < 1 or options.most < 1:
        parser.error("--nj and --utterances are at least 1")
    try:
        make(options.out, options.seed, options.most, options.nj)
    except UserError as error:
        sys.exit(f"mini.py: {error}")
    except ImportError as error:
        sys.exit(f"mini.py: {error}; run utils/setup.sh, or pip install espeakng-loader soundfile")
    except OSError as error:
        sys.exit(f"mini.py: {error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
