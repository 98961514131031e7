"""Mini corpora: synthesised by espeak-ng, in parallel, resumable after a kill.

A mini corpus is a folder in the layout of the real one, with two more files: SHA256SUMS, as
`sha256sum` writes it, and `.recipe`, which lists everything that determines its bytes. A second run
checks every file by its hash and makes what is missing or damaged, also after a killed run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import voices

from fedtools.core.atomic import sha256, write_text
from fedtools.core.errors import UserError, exit_with_message
from fedtools.core.signals import uninterrupted

Clip = TypeVar("Clip")
Speak = Callable[[voices.Synthesiser, Clip, Path], None]
Make = Callable[..., None]


def recipe_of(arguments: Sequence[str], script: str) -> str:
    """Return what determines a corpus' bytes: the arguments, the code, and the two libraries."""
    import espeakng_loader
    import soundfile

    files = (Path(script), Path(voices.__file__), Path(espeakng_loader.get_library_path()))
    parts = [*arguments, soundfile.__libsndfile_version__, *(sha256(path) for path in files)]
    return "\n".join(parts) + "\n"


def make_corpus(
    corpus: Path,
    recipe: str,
    clips: Mapping[str, Clip],
    speak: Speak,
    tables: Sequence[str],
    write_tables: Callable[[], None],
    jobs: int,
) -> None:
    """Make a corpus, or its missing and damaged files.

    Args:
        corpus: its folder; it is emptied if another recipe made it.
        recipe: the text that `recipe_of` returned.
        clips: the path of each clip within the corpus -> the clip.
        speak: called in a separate process with a synthesiser, a clip, and the path to write it to
            atomically.
        tables: the paths of all other files within the corpus.
        write_tables: called to write these when all clips exist.
        jobs: number of processes.

    Raises:
        UserError: if this script did not make the folder, or a clip cannot be made.
    """
    _claim(corpus, recipe)
    final, partial = corpus / "SHA256SUMS", corpus / ".sums"
    sums = {**_read_sums(final), **_read_sums(partial)}
    missing = [name for name in clips if not _is_whole(corpus / name, sums.get(name))]
    if not missing and all(_is_whole(corpus / name, sums.get(name)) for name in tables):
        print(f"{corpus}: {len(clips)} clips are complete", file=sys.stderr)
        return
    print(f"{corpus}: making {len(missing)} clips with espeak-ng", file=sys.stderr)
    with open(partial, "a", encoding="utf-8") as file:
        wanted = {name: clips[name] for name in missing}
        for name, digest in _make_missing(wanted, speak, corpus, min(jobs, len(missing))):
            sums[name] = digest
            file.write(f"{digest}  {name}\n")
            file.flush()
    write_tables()
    sums.update({name: sha256(corpus / name) for name in tables})
    write_text(final, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
    partial.unlink()


def run(
    script: str,
    description: str,
    corpus: str,
    most: int,
    what: str,
    make: Make,
    more: Mapping[str, str] | None = None,
) -> None:
    """Run a mini corpus' command: exit 0 done, 1 bad input (one line on stderr), 2 wrong usage.

    Args:
        script: the script's own `__file__`.
        description: what the command does, for its help.
        corpus: the name of the folder that is made in OUT.
        most: maximum number of clips per speaker.
        what: the noun for what --utterances counts.
        make: called with OUT / `corpus`, the seed, the maximum of clips per speaker, the number of
            jobs, and the options of `more` by name.
        more: further options of this corpus, whole numbers with default 0 -> their help.
    """
    more = more or {}
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path, help=f"{corpus} is made in this folder")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    few = f"maximum number of {what} per speaker, for a smaller corpus"
    parser.add_argument("--utterances", dest="most", type=int, default=most, metavar="N", help=few)
    jobs = os.cpu_count() or 1
    parser.add_argument("--nj", type=int, default=jobs, help=f"processes (default: {jobs})")
    for name, text in more.items():
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=text)
    options = parser.parse_args()
    if options.nj < 1 or options.most < 1:
        parser.error("--nj and --utterances must be at least 1")
    given = {name: getattr(options, name) for name in more}
    for name, value in given.items():
        if value < 0:
            parser.error(f"--{name} must be at least 0")
    name = Path(script).name
    try:
        with exit_with_message(name):
            make(options.out / corpus, options.seed, options.most, options.nj, **given)
    except ImportError as error:
        sys.exit(f"{name}: {error}; run utils/setup.sh, or pip install espeakng-loader soundfile")


def _claim(corpus: Path, recipe: str) -> None:
    """Mark the folder as this recipe's, after emptying one that another seed or version made."""
    # If it is a link, its target is renamed, on its own disk.
    corpus = corpus.resolve()
    mark, old = corpus / ".recipe", corpus.with_name(f".{corpus.name}.old")
    if mark.exists() and mark.read_text(encoding="utf-8") != recipe:
        shutil.rmtree(old, ignore_errors=True)
        # Renamed before it is removed, because a half-removed folder may lack its mark.
        corpus.rename(old)
    # A run that was killed at its beginning leaves only the mark's temporary file.
    begun = f".{mark.name}."
    if corpus.exists() and not mark.exists():
        strange = [path for path in corpus.iterdir() if not path.name.startswith(begun)]
        if strange:
            raise UserError("was not made by this script", path=corpus, remedy="choose another OUT")
    shutil.rmtree(old, ignore_errors=True)
    corpus.mkdir(parents=True, exist_ok=True)
    for left_by_a_kill in corpus.rglob(".*.tmp"):
        left_by_a_kill.unlink(missing_ok=True)
    write_text(mark, recipe)


def _read_sums(path: Path) -> dict[str, str]:
    """Read name -> sha256 as `sha256sum` writes it, ignoring a truncated line."""
    sums = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            digest, _, name = line.partition("  ")
            if len(digest) == 64 and name:
                sums[name] = digest
    return sums


def _is_whole(path: Path, digest: str | None) -> bool:
    """Return whether a file exists and has the given hash."""
    return path.is_file() and sha256(path) == digest


def _make_clips(clips: Mapping[str, Clip], speak: Speak, corpus: Path, results) -> None:
    """Make clips, and send each one's (name, sha256), or an error's text, through a connection."""
    try:
        synthesiser = voices.Synthesiser()
        for name, clip in clips.items():
            speak(synthesiser, clip, corpus / name)
            results.send((name, sha256(corpus / name)))
    except BrokenPipeError:
        pass  # the parent process has ended
    except Exception as error:
        with suppress(BrokenPipeError):
            results.send(f"{type(error).__name__}: {error}")
    results.close()


def _make_missing(
    clips: Mapping[str, Clip], speak: Speak, corpus: Path, jobs: int
) -> Iterator[tuple[str, str]]:
    """Make clips in parallel processes, and yield the (name, sha256) of each when it is ready."""
    context = multiprocessing.get_context("fork")
    waiting = list[Connection]()
    for job in range(jobs):
        receiving, sending = context.Pipe(duplex=False)
        share = dict(list(clips.items())[job::jobs])
        arguments = share, speak, corpus, sending
        with uninterrupted():
            context.Process(target=_make_clips, args=arguments, daemon=True).start()
        sending.close()
        waiting.append(receiving)
    done = 0
    while waiting:
        ready = multiprocessing.connection.wait(waiting)
        for connection in [one for one in waiting if one in ready]:
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
        raise UserError(f"{len(clips) - done} clips were not made", remedy="run the command again")
