"""Commands that go to and from ESPnet's model files: export, import."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import app


@app.command("export")
def export(
    experiment: Path = typer.Argument(..., metavar="EXP", help="Made by fedtools average."),
    out: Path = typer.Argument(..., metavar="OUT", help="Folder for config.yaml and model.pth."),
    client: str = typer.Option(None, help="Whose model, where each client has its own."),
) -> None:
    """Write an averaged model as ESPnet's Speech2Text reads it."""
    from fedtools.federation.asr import AsrFederation
    from fedtools.federation.evaluate import load_average
    from fedtools.files.lines import read_bytes
    from fedtools.models.espnet import export_espnet

    federation = AsrFederation(experiment)
    load_average(federation, client or "")
    bpe = experiment / "bpe.model"
    for path in export_espnet(
        out,
        federation.experiment.config["model"],
        federation.model.state_dict(),
        federation.tokenizer.tokens,
        read_bytes(bpe) if bpe.exists() else None,
    ):
        print(path)


@app.command("import")
def import_(
    config: Path = typer.Argument(..., metavar="CONFIG", help="ESPnet's config.yaml."),
    model: Path = typer.Argument(..., metavar="MODEL", help="ESPnet's .pth file."),
    out: Path = typer.Argument(..., metavar="OUT", help="Folder for model.safetensors."),
) -> None:
    """Take over encoder and CTC of an ESPnet model, for fedtools init --start."""
    from fedtools.models.espnet import import_espnet

    left_out = import_espnet(config, model, out)
    if left_out:
        print(f"left out: {len(left_out)} tensors of the attention decoder")
    print(out / "model.safetensors")
