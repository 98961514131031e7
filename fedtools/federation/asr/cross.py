"""Cross-evaluation of each client's model on each client's data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError
from fedtools.core.progress import counted
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.core.text_files import read_lines
from fedtools.data.text_units import CHARACTER, WORD, TextUnit, read_text_unit
from fedtools.federation.evaluate import load_average
from fedtools.federation.federation import Federation
from fedtools.tasks.parts import CORPUS, MEASURED


def columns_of(unit: TextUnit) -> tuple[str, ...]:
    """Return the columns of the table."""
    return "name", "model", "data", unit.plural, "errors", unit.rate


def cross(
    experiments: Sequence[tuple[str, Federation]], data_path: str | Path, out: str | Path
) -> bool:
    """Write the WER of every client's averaged model on every client's utterances.

    Decoding is greedy. Languages written without spaces have CER instead of WER
    (`fedtools.data.text_units`). Figure 3 of Zhu et al. (Interspeech 2022) shows these rates.

    Args:
        experiments: experiments with their names, in which {} stands for the method's title.
            Experiments of the same name differ in their seed. Experiments without personal models
            are left out.
        data_path: a data directory with features, transcripts and clients.
        out: the table, with a row for each experiment, model and data.

    Returns:
        whether there were personal models; otherwise an existing table is removed.

    Raises:
        UserError: if the data have no client of an experiment.
    """
    rows, columns = [], columns_of(read_text_unit(data_path))
    for name, federation in experiments:
        path, clients = federation.experiment.path, federation.experiment.clients
        task = federation.task
        measured, corpus = task.need(MEASURED), task.need(CORPUS)
        if not federation.personal:
            continue
        name = name.replace("{}", federation.method.title)
        data = corpus.read_folder(data_path, "text")
        heard = set(data.utt2client.values())
        owners = [client for client in clients if client in heard]
        if not owners:
            raise UserError(f"no clients of {path}", path=data.path / "utt2client")
        own = {one: corpus.gather(data, data.client_utterances(one)) for one in owners}
        for model in counted(owners, f"cross {path.name}", "models"):
            load_average(federation, model)
            for one, utterances in own.items():
                found = measured(utterances)
                figures = (found["words"], found["errors"], found["wer"])
                values = (name, model, one, *figures)
                rows.append(dict(zip(columns, values, strict=True)))
    if rows:
        write_tsv(out, columns, rows)
    else:
        Path(out).unlink(missing_ok=True)
    return bool(rows)


def merge(parts: Sequence[str | Path], out: str | Path) -> bool:
    """Write the rows of several tables of `cross` to one, in order; missing parts are left out.

    Returns:
        whether there was a part; otherwise an existing table is removed.

    Raises:
        UserError: if parts count different units.
    """
    lines: list[str] = []
    there = [part for part in map(Path, parts) if part.exists()]
    for part in there:
        header, *rows = read_lines(part)
        if lines and header != lines[0]:
            problem = f"not the columns of {there[0]}"
            raise UserError(problem, path=part, remedy="measure both again")
        lines += rows if lines else [header, *rows]
    if lines:
        write_text(Path(out), "\n".join(lines) + "\n")
    else:
        Path(out).unlink(missing_ok=True)
    return bool(lines)


def read_cross(path: Path) -> dict[str, dict[tuple[str, str], float]]:
    """Read name -> (model's client, data's client) -> WER or CER in %, averaged over seeds."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    header = read_lines(path)[:1]
    unit = CHARACTER if header == ["\t".join(columns_of(CHARACTER))] else WORD
    for row in read_tsv(path, columns_of(unit), (unit.rate,), ()):
        pair = row["model"], row["data"]
        found.setdefault(row["name"], {}).setdefault(pair, []).append(float(row[unit.rate]))
    return {
        name: {pair: statistics.fmean(rates) for pair, rates in of_name.items()}
        for name, of_name in found.items()
    }
