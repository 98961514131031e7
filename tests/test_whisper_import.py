"""CTranslate2's and OpenAI's Whisper models, as folders that transformers loads."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import resource
import shutil
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_whisper as tiny
import torch
from conftest import contents
from transformers import AutoTokenizer, GenerationConfig, WhisperForConditionalGeneration

HERE = Path(__file__).resolve().parent
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def whisper():
    return tiny.model()


def load(folder: Path, **options) -> WhisperForConditionalGeneration:
    """Load a folder's model and check that transformers has no missing or unexpected tensor."""
    model, told = WhisperForConditionalGeneration.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
    )
    assert not any(told.values()), told
    return model.eval()


def same_tensors(model, expected: dict[str, torch.Tensor]) -> None:
    found = tiny.state(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def save_pt(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


# --------------------------------------------------------------------------------------------
# Conversions.


def test_float16_of_the_librarys_own_converter_is_exact(whisper, tmp_path, cli):
    source = tiny.ct2_folder(tmp_path / "ct2", (HERE / "whisper.float16.bin").read_bytes())
    assert cli("import", source, tmp_path / "hf").ok().out == f"{tmp_path}/hf/model.safetensors\n"
    assert {path.name for path in (tmp_path / "hf").iterdir()} == FILES
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    model = load(tmp_path / "hf")
    same_tensors(model, tiny.state(whisper.half()))
    whisper.float()
    wanted = whisper.config.to_dict()
    found = model.config.to_dict()
    assert {name for name in wanted if found[name] != wanted[name]} <= {
        "_name_or_path", "dtype", "transformers_version", "architectures",
    }  # fmt: skip
    assert (model.config.dtype, found["architectures"]) == (
        torch.float16,
        ["WhisperForConditionalGeneration"],
    )


def test_int8_of_the_librarys_own_converter_is_as_near_as_it_is(whisper, tmp_path, cli):
    source = tiny.ct2_folder(tmp_path / "ct2", (HERE / "whisper.int8.bin").read_bytes())
    said = cli("import", source, tmp_path / "hf").ok().out.splitlines()
    assert len(said) == 2 and "8-bit" in said[0]
    found = tiny.state(load(tmp_path / "hf"))
    inexact = 0
    for name, value in tiny.state(whisper).items():
        assert found[name].dtype == torch.float32
        difference = (found[name] - value).abs()
        if value.dim() == 1 or "embed_positions" in name:
            assert not difference.any(), name
            continue
        assert (difference.flatten(1).amax(1).numpy() <= tiny.step(value) * 1.001).all(), name
        inexact += bool(difference.any())
    assert inexact > 10


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_a_folder_of_ctranslate2_is_converted_and_computes_the_same(kind, whisper, tmp_path, cli):
    tensors = {name: value.to(kind) for name, value in tiny.state(whisper).items()}
    source = tiny.ct2_folder(tmp_path / "ct2", tiny.model_bin(tiny.variables(tensors)))
    cli("import", source, tmp_path / "a folder").ok()
    model = load(tmp_path / "a folder")
    assert model.dtype == kind
    same_tensors(model, tensors)
    features = torch.linspace(-1, 1, 5 * 22).reshape(1, 5, 22)
    with torch.no_grad():
        one, two = (
            each(input_features=features, decoder_input_ids=torch.tensor([[9, 1, 2]])).logits
            for each in (model.float(), whisper)
        )
    assert torch.equal(one, two)


def test_a_checkpoint_of_openai_is_converted(whisper, tmp_path, cli):
    """Half of its tensors have half precision, and keep it."""
    content = tiny.checkpoint(whisper)
    for name in list(content["model_state_dict"])[::2]:
        content["model_state_dict"][name] = content["model_state_dict"][name].half()
    source = save_pt(tmp_path / "tiny.pt", content)
    tiny.tokenizer(tmp_path / "tokens")
    said = cli("import", source, tmp_path / "hf", "--tokenizer", tmp_path / "tokens").ok().out
    assert "names no token to suppress" in said.splitlines()[0]
    same_tensors(load(tmp_path / "hf", dtype=torch.float32), tiny.state(whisper))
    # Every converted folder has the tokenizer, with the suppressed tokens.
    first = tiny.ct2_folder(tmp_path / "ct2", (HERE / "whisper.float16.bin").read_bytes())
    cli("import", first, tmp_path / "first").ok()
    for number, folder in enumerate((first, tmp_path / "first")):
        said = cli("import", source, tmp_path / str(number), "--tokenizer", folder).ok().out
        assert said == f"{tmp_path / str(number)}/model.safetensors\n"
        told = GenerationConfig.from_pretrained(tmp_path / str(number))
        assert told.suppress_tokens == [2, 3] and told.alignment_heads == tiny.HEADS


def test_the_same_source_gives_the_same_bytes(tmp_path, cli):
    source = tiny.ct2_folder(tmp_path / "ct2", (HERE / "whisper.float16.bin").read_bytes())
    for name in ("one", "two"):
        cli("import", source, tmp_path / name).ok()
    one, two = (contents((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert list(one.values()) == [two[tmp_path / "two" / path.name] for path in one]


@pytest.mark.parametrize(("size", "multilingual"), [(51_864, False), (51_865, True)])
def test_the_vocabulary_tells_english_only_from_multilingual(size, multilingual, tmp_path, cli):
    whisper = tiny.model(size)
    content = tiny.model_bin(tiny.variables(tiny.state(whisper)))
    cli("import", tiny.ct2_folder(tmp_path / "ct2", content, size), tmp_path / "hf").ok()
    model, tokens = load(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    number = {name: size - 1501 - len(tiny.SPECIAL) + i for i, name in enumerate(tiny.SPECIAL)}
    assert tokens.convert_tokens_to_ids(list(number)) == list(number.values())
    # After the last of them, transformers counts timestamps.
    assert sorted(tokens.all_special_ids) == list(number.values())
    assert tokens.all_special_ids[-1] == number["<|notimestamps|>"]
    told = model.generation_config
    assert told.is_multilingual == multilingual
    assert told.no_timestamps_token_id == number["<|notimestamps|>"] == size - 1502
    assert told.prev_sot_token_id == number["<|startofprev|>"]
    assert told.eos_token_id == told.pad_token_id == told.bos_token_id == number["<|endoftext|>"]
    features = torch.zeros(1, 5, 22)
    options = {"language": "de", "task": "transcribe"} if multilingual else {}
    begun = model._retrieve_init_tokens(
        features, 1, told.__class__(**told.to_dict() | {"return_timestamps": False} | options),
        model.config, 22, {},
    )  # fmt: skip
    prompt = ["<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    prompt = prompt if multilingual else [prompt[0], prompt[-1]]
    assert begun.tolist() == [[number[name] for name in prompt]]
    assert tokens.decode([0, 1, number["<|endoftext|>"]], skip_special_tokens=True) == "ab"
    if multilingual:
        assert told.lang_to_id == {f"<|{one}|>": number[f"<|{one}|>"] for one in tiny.LANGUAGES}
        assert set(told.task_to_id) == {"translate", "transcribe"}


# --------------------------------------------------------------------------------------------
# Refusals, each in a line that names the file, without a traceback.


def refused(cli, source: Path, *said: str, tokenizer: Path | None = None) -> None:
    """Check that conversion fails and leaves nothing next to the source, under any name."""
    before = sorted(source.parent.iterdir())
    options = [] if tokenizer is None else ["--tokenizer", tokenizer]
    cli("import", source, source.parent / "hf", *options).fails(1, *said)
    assert sorted(source.parent.iterdir()) == before


@pytest.fixture
def theirs(whisper):
    return tiny.variables(tiny.state(whisper))


@pytest.mark.parametrize("every", [1, 11])
def test_a_model_that_is_cut_off_anywhere(theirs, tmp_path, cli, every):
    whole = tiny.model_bin(theirs)
    source = tiny.ct2_folder(tmp_path / "ct2", whole)
    ends = {*range(60), *range(60, len(whole), 1999), *range(len(whole) - 60, len(whole))}
    for end in sorted(ends)[::every]:
        (source / "model.bin").write_bytes(whole[:end])
        refused(cli, source, "model.bin: ")
    (source / "model.bin").write_bytes(whole + b"\0")
    refused(cli, source, "1 bytes after the end")


CONV = "encoder/conv1/bias"


def form(rank: int, size: int, kind: int, count: int) -> bytes:
    """Return a model.bin's entry of a one-dimensional variable: shape, type, and byte count."""
    return struct.pack("<BI", rank, size) + struct.pack("<BI", kind, count)


TRUE = form(1, 8, 0, 32)
LYING = {
    "a variable of 4 GB": (TRUE, form(1, 0x3FFFFFFF, 0, 0xFFFFFFFC), "bytes are expected where"),
    "more bytes than the shape": (TRUE, form(1, 8, 0, 36), f"{CONV}' of shape [8] has 36 bytes"),
    "a shape of no element": (TRUE, form(1, 0, 0, 0), f"{CONV}' of shape [0] has 0 bytes"),
    "200 dimensions": (TRUE, form(200, 8, 0, 32), "200 dimensions"),
    "an unknown type": (TRUE, form(1, 8, 6, 32), "unknown type 6"),
    "a name without an end": (tiny.text(CONV)[:-1] + b"\0", tiny.text(CONV)[:-1] + b"x", "a name"),
    "a name with control characters": (b"conv1/bias\0", b"conv1\n[31m\0", "a name"),
}


@pytest.mark.parametrize("what", LYING)
def test_a_model_that_lies_about_a_variable(what, theirs, tmp_path, cli):
    true, false, said = LYING[what]
    whole = tiny.model_bin(theirs)
    place = whole.index(tiny.text(CONV))
    begin, rest = whole[:place], whole[place:]
    assert true in rest[:100]
    source = tiny.ct2_folder(tmp_path / "ct2", begin + rest.replace(true, false, 1))
    refused(cli, source, said)


def test_more_variables_than_there_are(theirs, tmp_path, cli):
    whole = tiny.model_bin(theirs)
    count = struct.pack("<I", len(theirs))
    place = whole.index(count, 22)
    content = whole[:place] + b"\xff\xff\xff\xff" + whole[place + 4 :]
    refused(cli, tiny.ct2_folder(tmp_path / "ct2", content), "model.bin: ")


def test_aliases_are_not_larger_than_the_file(theirs, tmp_path, cli):
    """Each of some bytes would be a copy of a variable: 2,000 of 40 MB are 80 GB."""
    largest = max(theirs, key=lambda name: theirs[name].nbytes)
    aliases = {f"alias{number}": largest for number in range(2000)}
    source = tiny.ct2_folder(tmp_path / "ct2", tiny.model_bin(theirs, aliases))
    refused(cli, source, "aliases, such as 'alias", "of more bytes than the file")


@contextlib.contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Let files be no longer, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_of_one_line(theirs, tmp_path, cli):
    source = tiny.ct2_folder(tmp_path / "ct2", tiny.model_bin(theirs))
    with disk_of(4000):
        refused(cli, source, "model.safetensors: File too large")


LAYER = "decoder/layer_1"
BAD = {
    "another version": (lambda v: tiny.model_bin(v, version=5), "version 5", "convert"),
    "another kind": (lambda v: tiny.model_bin(v, kind="TransformerSpec"), "'TransformerSpec'"),
    "another revision": (lambda v: tiny.model_bin(v, revision=2), "revision 2"),
    "an alias of nothing": (lambda v: tiny.model_bin(v, {"a": "b"}), "alias 'a' of 'b'"),
    "an alias that is there": (lambda v: tiny.model_bin(v, {CONV: CONV}), f"alias '{CONV}'"),
    "a variable twice": (
        lambda v: tiny.model_bin(v).replace(b"conv2/bias\0", b"conv1/bias\0"), "is duplicated"),
    "a missing tensor": (lambda v: tiny.model_bin(without(v, CONV)), "conv1.bias' is missing"),
    "no heads": (lambda v: tiny.model_bin(without(v, "encoder/num_heads")), "num_heads is missing"),
    "heads that do not divide": (
        lambda v: tiny.model_bin(v | {"encoder/num_heads": torch.tensor(3, dtype=torch.int16)}),
        "3 attention heads"),
    "no heads at all": (
        lambda v: tiny.model_bin(v | {"encoder/num_heads": torch.tensor(0, dtype=torch.int16)}),
        "encoder_attention_heads is 0"),
    "another activation": (
        lambda v: tiny.model_bin(v | {"decoder/activation": torch.tensor(0, dtype=torch.int8)}),
        "decoder/activation is 0"),
    "an unknown flag": (
        lambda v: tiny.model_bin(v | {"decoder/rotary": torch.tensor(1, dtype=torch.int8)}),
        "'decoder/rotary' does not belong"),
    "an unknown variable": (
        lambda v: tiny.model_bin(v | {f"{LAYER}/gate/weight": torch.ones(8, 8)}),
        f"'{LAYER}/gate/weight' does not belong"),
    "a layer between": (
        lambda v: {name.replace("layer_1", "layer_7"): one for name, one in v.items()},
        "layers.1."),
    "another shape": (lambda v: tiny.model_bin(v | {CONV: torch.ones(9)}), "has shape (9,)"),
    "a NaN": (lambda v: tiny.model_bin(v | {CONV: torch.full((8,), math.nan)}), "has a NaN"),
    "a bias of keys": (
        lambda v: tiny.model_bin(v | {f"{LAYER}/attention/linear_1/bias": torch.ones(16)}),
        "bias for keys"),
    "q, k and v that are not three": (
        lambda v: tiny.model_bin(v | {f"{LAYER}/self_attention/linear_0/bias": torch.ones(23)}),
        "has the wrong shape (23,)"),
    "an output layer of its own": (
        lambda v: tiny.model_bin(v | {"decoder/projection/weight": torch.ones(tiny.SMALL, 8)}, {}),
        "not the embedding matrix"),
    "16 bits": (
        lambda v: tiny.model_bin(v | {CONV: torch.ones(8, dtype=torch.int16)}),
        f"{CONV} has type int16"),
    "8 bits without a scale": (
        lambda v: tiny.model_bin(v | {CONV: torch.ones(8, dtype=torch.int8)}), "_scale is missing"),
    "8 bits with a scale of 0": (
        lambda v: tiny.model_bin(
            v | {CONV: torch.ones(8, dtype=torch.int8), f"{CONV}_scale": torch.zeros(8)}),
        "conv1.bias' has a NaN or infinity"),
    "a scale of nothing": (
        lambda v: tiny.model_bin(v | {f"{CONV}_scale": torch.ones(8)}),
        f"'{CONV}_scale' does not belong"),
}  # fmt: skip


def without(theirs: dict, name: str) -> dict:
    return {key: value for key, value in theirs.items() if key != name}


@pytest.mark.parametrize("what", BAD)
def test_a_model_that_is_no_whisper_is_refused_by_name(what, theirs, tmp_path, cli):
    make, *said = BAD[what]
    content = make(theirs)
    content = tiny.model_bin(content) if isinstance(content, dict) else content
    refused(cli, tiny.ct2_folder(tmp_path / "ct2", content), "model.bin: ", *said)


class Trap:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def folder(tmp_path):
    """Make a folder of a tokenizer, for checkpoints, which go to a folder of their own."""
    tiny.tokenizer(tmp_path / "tokens")
    (tmp_path / "pt").mkdir()
    return tmp_path / "tokens"


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_is_not_run(legacy, whisper, folder, tmp_path, cli):
    trap = tmp_path / "sprung"
    source = tmp_path / "pt/tiny.pt"
    content = tiny.checkpoint(whisper) | {"more": Trap(trap)}
    torch.save(content, source, _use_new_zipfile_serialization=not legacy)
    refused(cli, source, "not a file of tensors", tokenizer=folder)
    source.write_bytes(pickle.dumps(Trap(trap)))
    refused(cli, source, "not a file of tensors", tokenizer=folder)
    assert not trap.exists()
    torch.load(save_pt(source, Trap(trap)), weights_only=False)
    assert trap.exists(), "a trap that does not spring tests nothing"


def change(content: dict, **sizes: object) -> dict:
    return content | {"dims": content["dims"] | sizes}


def with_tensor(content: dict, value: object, name: str = "encoder.conv1.bias") -> dict:
    return content | {"model_state_dict": content["model_state_dict"] | {name: value}}


POINT = torch.ones(1)
CHECKPOINTS = {
    "a nested tensor": (
        lambda c: with_tensor(c, torch.nested.nested_tensor([torch.ones(2), torch.ones(6)])),
        "it holds a nested tensor",
    ),
    "a name of a million letters": (lambda c: with_tensor(c, POINT, "a" * 10**6), "aaa ... aaa"),
    "a state alone": (lambda c: c["model_state_dict"], "no dims and model_state_dict"),
    "no mapping": (lambda c: [1, 2], "no dims and model_state_dict"),
    "a size that is no number": (lambda c: change(c, n_mels="80"), "n_mels is not a whole number"),
    "a billion layers": (lambda c: change(c, n_text_layer=10**9), "too few for its layers"),
    "a negative size": (lambda c: change(c, n_text_layer=-1), "decoder_layers is -1"),
    "a wrong size": (lambda c: change(c, n_vocab=7), "has shape", "expected (7, 8)"),
    "two widths": (lambda c: change(c, n_text_state=16), "n_text_state"),
    "a tensor of numbers": (
        lambda c: with_tensor(c, [1.0]),
        "'encoder.conv1.bias' is not a tensor",
    ),
    "whole numbers": (
        lambda c: with_tensor(c, torch.ones(8, dtype=torch.int64)),
        "is not a tensor",
    ),
    "few elements": (lambda c: with_tensor(c, torch.ones(8).to_sparse()), "is not a tensor"),
    "an unknown tensor": (lambda c: with_tensor(c, POINT, "encoder.gate"), "'model.encoder.gate'"),
    "one number for a million": (
        lambda c: change(
            with_tensor(c, POINT.expand(1 << 24, 8), "decoder.token_embedding.weight"),
            n_vocab=1 << 24,
        ),
        "its tensors have more bytes than the file",
    ),
    "a tensor by two names": (
        lambda c: with_tensor(c, torch.ones(8), "encoder.layer_norm.bias"),
        "'model.encoder.layer_norm.bias' is duplicated",
    ),
}


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_a_checkpoint_that_is_no_whisper(what, whisper, folder, tmp_path, cli):
    make, *said = CHECKPOINTS[what]
    source = save_pt(tmp_path / "pt/tiny.pt", make(tiny.checkpoint(whisper)))
    refused(cli, source, "tiny.pt: ", *said, tokenizer=folder)


FOREIGN = {
    "whisper.cpp": (b"lmgg" + bytes(600), "whisper.cpp's format (GGML)", "its Hugging Face folder"),
    "llama.cpp": (b"GGUF" + bytes(600), "llama.cpp's format (GGUF)", "its Hugging Face folder"),
    "safetensors": (
        (2).to_bytes(8, "little") + b'{"a":' + bytes(600),
        "a safetensors file",
        "a Hugging Face folder needs no import",
    ),
    "keras": (b"\x89HDF\r\n" + bytes(600), "an HDF5 file", "the model's own PyTorch file"),
    "numpy": (b"\x93NUMPY" + bytes(600), "a NumPy array", "the model's own PyTorch file"),
    "gzip": (b"\x1f\x8b" + bytes(600), "compressed", "gunzip"),
    "nemo": (bytes(257) + b"ustar" + bytes(600), "a tar archive", "unpack it"),
    "page": (b"<!DOCTYPE html>" + bytes(600), "a web page", "download the file itself"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "a Git LFS pointer",
        "git lfs pull",
    ),
    "anything": (b"anything else" * 60, "no checkpoint of PyTorch", "download it again"),
    "a model": (torch.nn.Linear(1, 1), "an object of torch.nn", "save its tensors alone"),
}


def test_a_folder_of_a_checkpoint_names_its_file(folder, tmp_path, cli):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/tiny.pt").touch()
    said = f"name the file in it, {tmp_path}/cache/tiny.pt"
    refused(cli, tmp_path / "cache", "no model.bin", said, tokenizer=folder)


@pytest.mark.parametrize("what", FOREIGN)
def test_files_of_others_are_named_and_no_advice_is_unsafe(what, folder, tmp_path, cli):
    """PyTorch's own message advises to load with weights_only=False, which runs code."""
    content, *said = FOREIGN[what]
    source = tmp_path / "model.bin"
    if isinstance(content, bytes):
        source.write_bytes(content)
    else:
        torch.save(content, source)
    refused(cli, source, *said, tokenizer=folder)
    told = cli("import", source, tmp_path / "out", "--tokenizer", folder)
    assert "weights_only" not in told.err
    assert told.err.count("\n") == 1


def test_a_damaged_checkpoint_and_a_packed_one(whisper, folder, tmp_path, cli):
    source = save_pt(tmp_path / "pt/tiny.pt", tiny.checkpoint(whisper))
    whole = source.read_bytes()
    for end in (0, 10, len(whole) // 2, len(whole) - 1):
        source.write_bytes(whole[:end])
        refused(cli, source, "not a file of tensors", tokenizer=folder)
    source.write_bytes(whole)
    with zipfile.ZipFile(source) as stored:
        parts = {name: stored.read(name) for name in stored.namelist()}
    packed = zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED)
    with packed:
        for name, part in parts.items():
            packed.writestr(name, part + b"\0" * (1 << 20) * name.endswith("data/0"))
    refused(cli, source, "a compressed archive", tokenizer=folder)


def test_a_checkpoint_wants_a_tokenizer(whisper, tmp_path, cli):
    (tmp_path / "pt").mkdir()
    source = save_pt(tmp_path / "pt/tiny.pt", tiny.checkpoint(whisper))
    refused(cli, source, "has no tokenizer", "--tokenizer")
    refused(cli, source, "tokenizer.json: cannot be read", tokenizer=tmp_path)


def set_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


TOKENIZERS = {
    "no JSON": (lambda path: path.write_text("{"), "not JSON"),
    "a list": (lambda path: path.write_text("[]"), "not a JSON object"),
    "too deep": (lambda path: path.write_text("[" * 10**6), "not JSON"),
    "no vocabulary": (lambda path: set_json(path, model={}), "no model.vocab"),
    "a token of no number": (
        lambda path: set_json(path, added_tokens=[{"content": "a", "id": "1"}]), "added_tokens"),
    "no special tokens": (lambda path: set_json(path, added_tokens=[]), "no token <|endoftext|>"),
    "a token above the vocabulary": (
        lambda path: set_json(path, model={"vocab": {"a": tiny.SMALL}}), "is not below"),
    "that of another model": (
        lambda path: tiny.tokenizer(path.parent, 51_865),
        f"not below the model's vocabulary size {tiny.SMALL}"),
    "that of a smaller model": (
        lambda path: tiny.tokenizer(path.parent, tiny.SMALL - 1),
        f"for a model of {tiny.SMALL - 1} tokens", "--tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_tokenizer_that_is_damaged_or_of_another_model(what, tmp_path, cli):
    change, *said = TOKENIZERS[what]
    source = tiny.ct2_folder(tmp_path / "ct2", (HERE / "whisper.float16.bin").read_bytes())
    change(source / "tokenizer.json")
    refused(cli, source, "tokenizer.json: ", *said)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("suppress_ids", [1, tiny.SMALL], "suppress_ids are not tokens"),
        ("suppress_ids_begin", "220", "suppress_ids_begin are not tokens"),
        ("suppress_ids", [True], "suppress_ids are not tokens"),
        ("alignment_heads", [[1]], "alignment_heads are not pairs"),
    ],
)
def test_a_config_that_is_damaged(key, value, said, tmp_path, cli):
    source = tiny.ct2_folder(tmp_path / "ct2", (HERE / "whisper.float16.bin").read_bytes())
    set_json(source / "config.json", **{key: value})
    refused(cli, source, f"config.json: {said}")


def test_what_is_there_already_stays(tmp_path, cli):
    source = tiny.ct2_folder(tmp_path / "ct2", (HERE / "whisper.float16.bin").read_bytes())
    out = tmp_path / "hf"
    out.mkdir()
    cli("import", source, out).ok()
    before = contents(out.iterdir())
    cli("import", source, out).fails(1, f"{out}: already exists")
    assert contents(out.iterdir()) == before
    shutil.rmtree(out)
    out.write_text("mine")
    cli("import", source, out).fails(1, f"{out}: already exists")
    assert out.read_text() == "mine"
    cli("import", tmp_path / "ct2" / "nothing", out / "x", "--tokenizer", source).fails(
        1, "nothing"
    )


def test_usage(tmp_path, cli):
    cli("import", tmp_path).fails(2, "SOURCE")
    cli("import", *"abcd").fails(2, "SOURCE")
    cli("import", *"abc", "--tokenizer", tmp_path).fails(2, "--tokenizer")
    (tmp_path / "hf").mkdir()
    cli("import", tmp_path / "hf", tmp_path / "out").fails(1, "no model.bin")
