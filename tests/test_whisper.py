"""Whisper itself: its loss, its hypotheses and its tokens, and a federation that trains it."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from itertools import product
from pathlib import Path

import pytest
import simulated
import torch
import transformers
import yaml
from commands import Result
from conftest import inside, ledger
from hypothesis import given
from hypothesis import strategies as st
from pretrained_models import IDS, MARKS, save_recogniser
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel

from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.decode.repetition import compression_ratio, repeats
from fedtools.federation.federation import Federation
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.pretrained.options import Generation
from fedtools.models.pretrained.whisper import Whisper
from fedtools.tasks.asr.search import is_lost

START, END, NO_TIMES = (
    IDS[mark] for mark in ("<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>")
)
BINS = simulated.BINS


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whisper") / "tiny en"
    return save_recogniser(path, bins=BINS, max_source_positions=100)


def build(folder: Path, kind: str = "lora") -> Whisper:
    """Build a model in double precision whose adapters are not zero."""
    model = Whisper({"network": "hf", "path": str(folder), "adapt": {"kind": kind}}, "x", None)
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.2)
    return model.double().eval()


def batch_of(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    lengths = [len(text) for text in texts]
    padded = [text + [-1] * (max(lengths) - len(text)) for text in texts]
    return {
        "prompt": torch.tensor([[START, NO_TIMES]] * len(texts)),
        "text": torch.tensor(padded, dtype=torch.long),
        "text_lengths": torch.tensor(lengths),
    }


def test_the_loss_is_that_of_transformers(folder):
    model = build(folder, "full")
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder).double().eval()
    state = model.state_dict()
    for name, value in theirs.model.named_parameters():
        if name in state:
            value.data.copy_(state[name])
    text = [3, 1, 4, 1, 5]
    mel = torch.randn(1, 200, BINS, dtype=torch.double)
    given = torch.tensor([[START, NO_TIMES, *text]])
    logits = theirs(input_features=mel.transpose(1, 2), decoder_input_ids=given).logits
    wanted = torch.nn.functional.cross_entropy(
        logits[0, 1:], torch.tensor([*text, END]), reduction="sum"
    )
    found = model.losses(*model.encode(mel, torch.tensor([200])), batch_of([text]))
    torch.testing.assert_close(found[0], wanted, rtol=1e-10, atol=1e-10)


def test_an_utterance_in_a_batch_is_as_alone(folder):
    model, texts = build(folder), [[3, 1, 4], [2, 7, 1, 8, 2, 8]]
    mel, lengths = torch.randn(2, 200, BINS, dtype=torch.double), torch.tensor([100, 200])
    together = model.losses(*model.encode(mel, lengths), batch_of(texts))
    for row, text in enumerate(texts):
        own = mel[row : row + 1, : lengths[row]]
        alone = model.losses(*model.encode(own, lengths[row : row + 1]), batch_of([text]))
        torch.testing.assert_close(together[row], alone[0], rtol=1e-10, atol=1e-10)


def test_only_what_is_trained_is_in_the_state(folder):
    model = build(folder)
    assert all(name.split(".")[-1].startswith("lora_") for name in model.state_dict())
    whole = build(folder, "full").state_dict()
    # The token table is tied to the output layer.
    assert "decoder.embed_tokens.weight" in whole
    assert "proj_out.weight" not in whole


def score(model: Whisper, encoded: torch.Tensor, text: list[int]) -> float:
    lengths = torch.tensor([encoded.shape[1]])
    return -model.losses(encoded, lengths, batch_of([text]))[0].item()


def test_a_wide_beam_finds_the_best_of_all_hypotheses(folder):
    model = build(folder)
    # Room for two tokens.
    model.longest = 4
    encoded, _ = model.encode(torch.randn(1, 100, BINS).double(), torch.tensor([100]))
    prompt = torch.tensor([[START, NO_TIMES]])
    found = model.generate(encoded, prompt, Generation(beam=60, nbest=5), seconds=1)
    others = [token for token in IDS.values() if token != END]
    every = {}
    every |= {(one,): score(model, encoded, [one]) for one in others}
    for tokens, value in found:
        assert value == pytest.approx(score(model, encoded, tokens), abs=1e-9)
        if len(tokens) == 1:
            assert value == pytest.approx(every[tuple(tokens)], abs=1e-9)
    finished = [tokens for tokens, _ in found]
    assert len({tuple(tokens) for tokens in finished}) == len(finished)


def test_greedy_search_takes_the_best_token_each_time(folder):
    model = build(folder)
    encoded, lengths = model.encode(torch.randn(1, 100, BINS).double(), torch.tensor([100]))
    [(tokens, value)] = model.generate(
        encoded, torch.tensor([[START, NO_TIMES]]), Generation(1), seconds=1
    )
    written = [START, NO_TIMES]
    while len(written) - 2 < len(tokens):
        logits = model._decode(torch.tensor([written]), encoded, lengths)[0, -1]
        written.append(int(logits.argmax()))
    assert written[2:] == tokens
    assert value == pytest.approx(score(model, encoded, tokens), abs=1e-9)


def test_hypotheses_are_bounded_by_the_length_of_the_audio(tmp_path):
    """38 tokens a second are real speech in some scripts; without an end there are 85."""
    path = save_recogniser(tmp_path / "w", bins=BINS, max_source_positions=100,
                           max_target_positions=400)  # fmt: skip
    model = build(path)
    with torch.no_grad():
        # It never ends.
        model.decoder.embed_tokens.weight[END] = -100 * model.decoder.embed_tokens.weight[START]
    encoded, _ = model.encode(torch.randn(1, 100, BINS).double(), torch.tensor([100]))
    prompt = torch.tensor([[START, NO_TIMES]])
    [(tokens, _)] = model.generate(encoded, prompt, Generation(1), seconds=1)
    assert 38 < len(tokens) <= 85


def test_texts_are_tokens_and_back(folder):
    tokens = WhisperTokens.load(folder)
    for words in ("ab c", "a", "hello world"):
        ids = tokens.encode(words)
        assert ids[0] == IDS["Ġ"] and tokens.decode(ids) == words
    assert tokens.encode("") == []
    # Text that looks like a special token is spelled out.
    marked = tokens.encode("a <|endoftext|> b")
    assert not set(marked) & {IDS[mark] for mark in MARKS}
    assert tokens.decode([START, NO_TIMES, *tokens.encode("ab"), END]) == "ab"


def test_prompts_name_the_language_where_there_are_several(tmp_path, folder):
    assert WhisperTokens.load(folder).prompt(None) == [START, NO_TIMES]
    several = save_recogniser(tmp_path / "many", multilingual=True, bins=BINS)
    tokens = WhisperTokens.load(several)
    german = [START, IDS["<|de|>"], IDS["<|transcribe|>"], NO_TIMES]
    assert tokens.prompt("de") == tokens.prompt("de-AT") == tokens.prompt("deu") == german
    assert WhisperTokens.load(several, "de").prompt(None) == german
    for language, said in ((None, "no language is given"), ("xx", "no language 'xx'")):
        with pytest.raises(UserError, match=said):
            tokens.prompt(language)
    english = WhisperTokens.load(folder)
    assert english.prompt("en-GB") == english.prompt(None)
    with pytest.raises(UserError, match="knows English alone"):
        english.prompt("de")


@pytest.mark.parametrize(
    ("code", "own"),
    [("nb", "no"), ("no", "no"), ("jv", "jw"), ("iw", "he"), ("cmn", "zh"), ("zho", "zh"),
     ("deu", "de"), ("ekk", "et"), ("fil", "tl"), ("yue", "yue")],
)  # fmt: skip
def test_codes_of_languages_are_whispers(tmp_path, code, own):
    """Pairs as in OpenAI's list of languages."""
    path = save_recogniser(tmp_path / "many", multilingual=True, bins=BINS)
    path = changed(path, tmp_path / "w", SETTINGS, lang_to_id={f"<|{own}|>": 3, "<|en|>": 4})
    assert WhisperTokens.load(path).prompt(code)[1] == 3


TOKENS, SETTINGS = "tokenizer.json", "generation_config.json"


def changed(folder: Path, out: Path, name: str, **change: object) -> Path:
    """Copy a model's folder with another value in a file of JSON."""
    shutil.copytree(folder, out)
    content = json.loads((out / name).read_text())
    (out / name).write_text(json.dumps({**content, **change}))
    return out


def test_stored_options_of_a_tokenizer_change_no_labels(tmp_path, folder):
    """Dropout makes tokens random; truncation and padding are kept from whoever last called it."""
    words, model = "hello world", json.loads((folder / TOKENS).read_text())["model"]
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    given = {"truncation": cut, "padding": pad, "model": {**model, "dropout": 0.9}}
    expected = [IDS[one] for one in ("Ġ", *"hello", "Ġ", *"world")]
    for name, value in given.items():
        path = changed(folder, tmp_path / name, TOKENS, **{name: value})
        for _ in range(5):
            assert WhisperTokens.load(path).encode(words) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "x"}}, "not BPE"),
        ({"model": {"type": "Unigram", "vocab": [], "unk_id": None}}, "not BPE"),
        ({"model": None}, "not BPE"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}}}, "not ByteLevel"),
        ({"decoder": {"type": "CTC"}}, "not ByteLevel"),
        ({"decoder": {}}, "not ByteLevel"),
        ({"added_tokens": 1}, "not the tokens of a model"),
    ],
)
def test_tokens_of_no_whisper_are_refused(tmp_path, folder, change, said):
    path = changed(folder, tmp_path / "w", TOKENS, **change)
    with pytest.raises(UserError, match=said):
        WhisperTokens.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("eos_token_id", value) for value in (10**12, -7, "26", 26.0, None, [], [-1], True)),
        ("decoder_start_token_id", 10**30),
        ("no_timestamps_token_id", 10**9),
        *(("lang_to_id", value) for value in (None, [1], "x", {"<|de|>": 29.5}, {"<|de|>": 99})),
        *(("task_to_id", value) for value in (None, {}, {"transcribe": 10**9})),
    ],
)
def test_settings_that_name_no_tokens_are_refused(tmp_path, name, value):
    path = save_recogniser(tmp_path / "many", multilingual=True, bins=BINS)
    path = changed(path, tmp_path / "w", SETTINGS, **{name: value})
    with pytest.raises(UserError, match=SETTINGS):
        WhisperTokens.load(path)


def test_json_that_nests_too_deeply_is_refused(tmp_path, folder):
    for name in (TOKENS, SETTINGS):
        path = changed(folder, tmp_path / name, name)
        (path / name).write_text("[" * 200_000)
        with pytest.raises(UserError, match="not JSON"):
            WhisperTokens.load(path)


def test_of_several_ends_the_first_is_written(tmp_path, folder):
    path = changed(folder, tmp_path / "w", SETTINGS, eos_token_id=[END, 5])
    assert WhisperTokens.load(path).end == END
    assert build(path).end == END


def hypotheses(folder: Path) -> list[tuple[list[int], float]]:
    torch.manual_seed(0)
    model = build(folder)
    frames = torch.randn(1, 100, BINS, generator=torch.Generator().manual_seed(2)).double()
    encoded, _ = model.encode(frames, torch.tensor([100]))
    prompt = torch.tensor([[START, NO_TIMES]])
    return model.generate(encoded, prompt, Generation(4, 4), seconds=1)


def test_the_search_takes_tokens_from_the_settings_and_nothing_else(tmp_path, folder):
    """Suppressed tokens are in no hypothesis; a time limit and penalties have no effect."""
    plain = hypotheses(folder)
    others = {"max_time": 1e-6, "repetition_penalty": 0.0, "no_repeat_ngram_size": 1}
    others |= {"penalty_alpha": 0.6, "top_k": 4, "do_sample": True, "bad_words_ids": [[10**9]]}
    others |= {"length_penalty": "x", "stop_strings": ["a"], "min_length": 10**6}
    found = hypotheses(changed(folder, tmp_path / "others", SETTINGS, **others))
    assert found == plain
    written = {token for tokens, _ in plain for token in tokens}
    first = plain[0][0][0]
    path = changed(folder, tmp_path / "suppressed", SETTINGS, suppress_tokens=[*written])
    assert not {token for tokens, _ in hypotheses(path) for token in tokens} & written
    path = changed(folder, tmp_path / "begun", SETTINGS, begin_suppress_tokens=[first])
    assert first not in {tokens[0] for tokens, _ in hypotheses(path)}
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        path = changed(folder, tmp_path / f"{name} lacks", SETTINGS, **{name: [10**9]})
        assert hypotheses(path) == plain
        for value in ("x", [True], [-99]):
            path = changed(folder, tmp_path / f"{name} {value}", SETTINGS, **{name: value})
            with pytest.raises(UserError, match=f"{name}: .* is no token of the model"):
                build(path)


# Article 1 of the Universal Declaration of Human Rights.
SENTENCES = {
    "ka": "ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით",
    "km": "មនុស្សទាំងអស់កើតមកមានសេរីភាពនិងសមភាពក្នុងសេចក្ដីថ្លៃថ្នូរនិងសិទ្ធិ",
    "am": "የሰው ልጅ ሁሉ ሲወለድ ነጻና በክብርና በመብትም እኩልነት ያለው ነው",
    "bn": "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে",
    "lo": "ມະນຸດທຸກຄົນເກີດມາມີກຽດສັກສີ ສິດທິ ເສລີພາບແລະຄວາມສະເໝີພາບເທົ່າທຽມກັນ",
    "en": "all human beings are born free and equal in dignity and rights they are endowed",
}


@pytest.mark.parametrize("sentence", SENTENCES.values(), ids=SENTENCES)
def test_sentences_do_not_repeat_themselves_in_any_script(sentence):
    """Their bytes, of which byte-level tokens are made, do in some."""
    assert not repeats(sentence) and compression_ratio(sentence) < 1.6
    first = sentence.split()[0]
    for many in (" ".join([first] * 20), first * 20):
        assert repeats(many) and compression_ratio(many) > 2.4
    assert not repeats(" ".join([first] * 5))


@pytest.mark.parametrize("sentence", SENTENCES.values(), ids=SENTENCES)
def test_tokens_of_single_bytes_are_no_repetition(tmp_path, folder, sentence):
    """Each letter of most scripts is three tokens, the first two the same."""
    pieces = sorted(ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    path = changed(folder, tmp_path / "w", TOKENS, model=model, added_tokens=[])
    tokens = WhisperTokens.load(path)
    ids = tokens.encode(sentence)
    assert len(ids) == len(sentence.encode()) + 1 and tokens.decode(ids) == sentence
    assert not is_lost(tokens, ids)
    assert is_lost(tokens, tokens.encode(" ".join([sentence.split()[0]] * 20)))
    assert is_lost(tokens, tokens.encode(" ") * 9) and not is_lost(tokens, [])


@given(st.text(st.characters(max_codepoint=127), max_size=200))
def test_compression_is_whispers_own_for_latin_letters(text):
    whole = text.encode()
    assert compression_ratio(text) == len(whole) / len(zlib.compress(whole))


@pytest.fixture(scope="module")
def world(tmp_path_factory, folder) -> Path:
    root = tmp_path_factory.mktemp("world")
    for split, seed in (("train", 0), ("valid", 1)):
        simulated.data_dir(root / split, ["au", "en"], 4, seed, log_mel=True)
    model = {"network": "hf", "path": str(folder), "criterion": "seq2seq"}
    config = {
        "task": "asr",
        "rounds": 2,
        "evaluate_every": 1,
        "model": model | {"adapt": {"kind": "lora", "rank": 2}},
        "training": {"optim": "adamw", "optim_conf": {"lr": 0.01}, "batch_bins": 20_000},
        "decode": {"beam": 3, "nbest": 2},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root


def begin(world: Path, name: str, folder: Path, *more: str) -> Path:
    path = world / name
    inside(
        *("init", path, "--config", world / "config.yaml", "--method", "fedavg"),
        *("--data", f"train={world / 'train'}", "--data", f"valid={world / 'valid'}"),
        *("--asset", f"tokens={folder}", *more),
    ).ok()
    return path


def test_a_federation_trains_and_decodes(world, folder):
    path = begin(world, "plain", folder)
    inside("rounds", path).ok()
    begun, ended = (load_file(path / f"round_000{n}/global.safetensors") for n in (1, 3))
    assert begun.keys() == ended.keys()
    assert all(name.split(".")[-1].startswith("lora_") for name in ended)
    assert any((begun[name] != ended[name]).any() for name in ended)
    assert {row["status"] for row in ledger(path)} == {"ok"}
    for name, options in (("greedy", ()), ("beam", ("--config", world / "config.yaml"))):
        out = world / name
        inside("decode", path, world / "valid", out, "--model", "round:2", *options).ok()
        rows = [line.split("\t") for line in (out / "nbest.tsv").read_text().splitlines()]
        assert {row[3] for row in rows} == {"0"}
        lists: dict[str, list[list[str]]] = {}
        for row in rows:
            lists.setdefault(row[0], []).append(row)
        assert len(lists) == 8
        for rows in lists.values():
            assert len({row[4] for row in rows}) == len(rows) <= (2 if name == "beam" else 1)
    inside("decode", path, world / "valid", world / "x", "--lm", world).fails(1, "leave out --lm")
    best = {}
    for nbest in (1, 2, 3):
        out, config = world / f"nbest{nbest}", world / f"nbest{nbest}.yaml"
        config.write_text(f"decode: {{beam: 3, nbest: {nbest}}}\n")
        inside("decode", path, world / "valid", out, "--model", "round:2", "--config", config).ok()
        rows = [line.split("\t") for line in (out / "nbest.tsv").read_text().splitlines()]
        best[nbest] = [row for row in rows if row[1] == "1"]
    assert [row[4] for row in best[1]] == [row[4] for row in best[2]] == [row[4] for row in best[3]]


def test_labels_of_a_teacher_that_repeats_itself_are_counted(world, folder):
    settings = ("--set", "training.labels=continuous", "--set", "rounds=1")
    search = ("--set", "training.search.no_repeat_ngram_size=0")
    path = begin(world, "taught", folder, *settings, *search)
    inside("rounds", path).ok()
    # A random decoder repeats itself, or outputs nothing.
    assert "collapsed" in {row["status"] for row in ledger(path)}


def test_the_search_is_frozen_with_all_its_options(world, folder):
    """An experiment from before an option is refused instead of taking today's default."""
    path = begin(world, "frozen", folder, "--set", "training.search.temperatures=[0.2, 1]")
    config = path / "config.yaml"
    search = yaml.safe_load(config.read_text())["training"]["search"]
    names = ["beam", "nbest", "no_repeat_ngram_size", "temperatures", "compression_ratio_threshold"]
    assert list(search) == [*names, "logprob_threshold", "no_speech_threshold"]
    assert search["no_repeat_ngram_size"] == 4 and search["temperatures"] == [0.2, 1.0]
    # As an earlier checkout would have written it.
    config.write_text(config.read_text().replace("    no_repeat_ngram_size: 4\n", ""))
    sums = path / "sha256sums"
    lines = [line for line in sums.read_text().splitlines() if "config.yaml" not in line]
    digest = hashlib.sha256(config.read_bytes()).hexdigest()
    sums.write_text("".join(f"{line}\n" for line in [*lines, f"{digest}  config.yaml"]))
    said = "option 'search.no_repeat_ngram_size' is missing", "begin another experiment"
    inside("rounds", path).fails(1, *said)


def test_what_whisper_cannot_do_is_told(world, folder, tmp_path):
    init = ("init", tmp_path / "e", "--config", world / "config.yaml", "--method", "fedavg")
    init += ("--data", f"train={world / 'train'}")
    inside(*init, "--asset", f"tokens={world}").fails(1, "tokenizer.json", "missing")
    targets = ("--set", "model.adapt.targets=[nothing]")
    inside(*init, "--asset", f"tokens={folder}", *targets).fails(1, "or convolution matches")
    for kind, value in product(["adapt.kind"], ["lara"]):
        one = ("--set", f"model.{kind}={value}")
        inside(*init, "--asset", f"tokens={folder}", *one).fails(1, "lora")
    assert not (tmp_path / "e" / "config.yaml").exists()


def test_tokens_of_another_model_are_refused(world, folder, tmp_path):
    """Ids of the English models are one less than those of the others."""
    other = shutil.copytree(folder, tmp_path / "other")
    content = json.loads((other / TOKENS).read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {"a": vocabulary["b"], "b": vocabulary["a"]}
    (other / TOKENS).write_text(json.dumps(content))
    many = save_recogniser(tmp_path / "many", multilingual=True, bins=BINS)
    lacks = shutil.copytree(folder, tmp_path / "lacks")
    (lacks / TOKENS).unlink()
    init = ("init", tmp_path / "e", "--config", world / "config.yaml", "--method", "fedavg")
    init += ("--data", f"train={world / 'train'}")
    for tokens, more in ((other, ()), (many, ("--set", "model.language=de"))):
        given = (*init, *more, "--asset", f"tokens={tokens}")
        inside(*given).fails(1, f"not the tokens of the model in {folder}", f"tokens={folder}")
    inside(*init, "--asset", f"tokens={folder}", "--set", f"model.path={lacks}").ok()


def test_transcripts_longer_than_the_decoder_are_dropped(world, folder, tmp_path):
    data = shutil.copytree(world / "train", tmp_path / "train")
    lines = (data / "text").read_text().splitlines()
    name = lines[3].split()[0]
    options = ("--config", world / "config.yaml", "--method", "fedavg")
    options += ("--data", f"train={data}", "--data", f"valid={data}", "--asset", f"tokens={folder}")

    def begun(letters: int, *places: int) -> tuple[Path, Result]:
        for place in places:
            lines[place] = f"{lines[place].split()[0]} {'a' * letters}"
        (data / "text").write_text("".join(f"{line}\n" for line in lines))
        path = tmp_path / f"{letters}.{len(places)}"
        return path, inside("init", path, *options)

    # A decoder of 40 positions, less a prompt and an end; each word begins with a blank.
    trained, losses = {}, {}
    for letters in (34, 35):
        path, done = begun(letters, 3)
        longer = "1 of 8 utterances have transcripts of more than the 35 tokens"
        assert (longer in done.ok().err) == (letters == 35)
        assert (f"dropped from training: {name}" in done.err) == (letters == 35)
        inside("rounds", path, "--to", "1", "--evaluate", "valid").ok()
        rows = read_tsv(path / "round_0001" / "update.1.tsv", None)
        trained[letters] = sum(int(row["utterances"]) for row in rows)
        told = read_tsv(path / "evaluate_valid.tsv", None)
        assert {row["utterances"] for row in told} == {"4"}
        losses[letters] = float(told[0]["loss"])
    # The loss is the mean of the client's three other utterances.
    begun_with = Federation(path)
    begun_with.load_result(None, 0)
    corpus, client = begun_with.task.corpus, told[0]["client"]
    valid = corpus.read("valid", False)
    others = [one for one in valid.client_utterances(client) if one != name]
    assert len(others) == 3
    of_three = begun_with.task.measured(corpus.gather(valid, others))["loss"]
    assert losses[35] == pytest.approx(float(of_three), abs=1e-5) != losses[34]
    assert trained == {34: 8, 35: 7}
    path, done = begun(36, *range(len(lines)))
    done.fails(1, "8 of 8 utterances have transcripts", "cut them by segments")
    assert not path.exists()


def test_a_transcript_longer_than_the_decoder_leaves_other_losses_alone(folder):
    model = build(folder)
    encoded, lengths = model.encode(torch.randn(2, 200, BINS).double(), torch.tensor([200, 120]))
    texts = [[3, 4, 5], [6] * (model.longest + 1)]
    together = model.losses(encoded, lengths, batch_of(texts))
    (alone,) = model.losses(encoded[:1], lengths[:1], batch_of(texts[:1]))
    assert together[1] == 0 and torch.isclose(together[0], alone)


def test_time_stamps_are_no_words(folder, tmp_path):
    """In the tokenizers of real models they are added tokens, but no special ones."""
    content = json.loads((folder / "tokenizer.json").read_text())
    stamp = {"content": "<|12.34|>", "single_word": False, "lstrip": False, "rstrip": False}
    number = len(IDS)
    stamp |= {"id": number, "normalized": False, "special": False}
    content["added_tokens"].append(stamp)
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(content))
    tokens = WhisperTokens.load(tmp_path / "model")
    assert tokens.tokens[number] == stamp["content"]
    ids = tokens.encode("ab")
    assert tokens.decode([number, *ids, number, *tokens.encode("ba"), number]) == "ab ba"


def test_other_settings_of_the_search_are_another_model(world, folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    path = begin(world, "changed", folder, "--set", f"model.path={model}")
    changed(folder, tmp_path / "new", SETTINGS, suppress_tokens=[1])
    shutil.copy(tmp_path / "new" / SETTINGS, model)
    inside("rounds", path).fails(1, "not the pretrained model that the experiment began with")
