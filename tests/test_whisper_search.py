"""Whisper's hypotheses: their order, and the fallbacks for those that went wrong."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import simulated
import torch
import transformers
from pretrained_models import IDS, save_recogniser
from torch import Tensor

from fedtools.decode.repetition import repeats
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.pretrained.options import Generation
from fedtools.models.pretrained.whisper import Whisper
from fedtools.tasks.asr.data import Batch
from fedtools.tasks.asr.search import Scored, generate

END, PROMPT = IDS["<|endoftext|>"], [IDS["<|startoftranscript|>"], IDS["<|notimestamps|>"]]
LONGEST = 40
PLAIN = Generation(beam=1, no_repeat_ngram_size=0, compression_ratio_threshold=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whisper") / "w"
    return save_recogniser(path, bins=simulated.BINS, max_source_positions=100,
                           max_target_positions=LONGEST)  # fmt: skip


@pytest.fixture(scope="module")
def model(folder) -> Whisper:
    """Return a model of random weights, of which about half the hypotheses repeat themselves."""
    config = {"network": "hf", "path": str(folder), "adapt": {"kind": "full"}}
    model = Whisper(config, "x", None)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(torch.randn_like(value) * 0.3)
            value.mul_(5 if name == "decoder.embed_positions.weight" else 1)
    return model.eval()


@pytest.fixture(scope="module")
def theirs(folder, model) -> transformers.WhisperForConditionalGeneration:
    """Return transformers' own model with the same weights."""
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    whole.model.load_state_dict(model.state_dict(), strict=False)
    return whole.eval()


@pytest.fixture(scope="module")
def tokens(folder) -> WhisperTokens:
    return WhisperTokens.load(folder)


def audio(number: int) -> Tensor:
    random = torch.Generator().manual_seed(number)
    return torch.randn(1, 200, simulated.BINS, generator=random)


def heard(
    model, tokens, options: Generation, number: int = 0, seed: int = 0, seconds: float = 2.0
) -> list[Scored]:
    with torch.no_grad():
        found = model.encode(audio(number), torch.tensor([200]))
    batch = Batch(prompt=torch.tensor([PROMPT]), seed=torch.tensor([seed]))
    batch["seconds"] = torch.tensor([seconds])
    return generate(model, tokens, found, batch, options)[0]


def by_transformers(theirs, number: int, **options) -> list[list[int]]:
    """Return the tokens of hypotheses of transformers' own search, without a window of 30 s."""
    with torch.no_grad():
        encoded = theirs.model.encoder(audio(number).transpose(1, 2))
    settings = transformers.GenerationConfig(
        eos_token_id=END, pad_token_id=END, decoder_start_token_id=PROMPT[0], do_sample=False
    )
    whole = copy.copy(theirs)
    whole.generation_config = settings
    rows = transformers.GenerationMixin.generate(
        *(whole,), encoder_outputs=encoded, decoder_input_ids=torch.tensor([PROMPT]),
        max_length=LONGEST, **options,
    )  # fmt: skip
    rows = [row[len(PROMPT) :].tolist() for row in rows]
    return [row[: row.index(END)] if END in row else row for row in rows]


SOME = range(8)


def test_what_repeats_itself_is_searched_again(model, tokens, theirs):
    """Its hypothesis is transformers' without a repeated sequence of four tokens."""
    kinds = Counter()
    for number in SOME[3:]:
        (first,) = by_transformers(theirs, number)
        again = repeats(tokens.decode(first))
        kinds[again] += 1
        (expected,) = by_transformers(theirs, number, no_repeat_ngram_size=4 * again)
        [(found, score)] = heard(model, tokens, replace(PLAIN, no_repeat_ngram_size=4), number)
        assert found == expected
        [(plain, _)] = heard(model, tokens, PLAIN, number)
        assert plain == first
        with torch.no_grad():
            row = torch.tensor([PROMPT + found + [END]])
            logits = theirs(audio(number).transpose(1, 2), decoder_input_ids=row[:, :-1]).logits
        wanted = logits[0, 1:].log_softmax(1).gather(1, row[0, 2:, None]).sum()
        assert score == pytest.approx(float(wanted), abs=1e-3)
    assert len(kinds) == 2, kinds


def test_the_order_of_hypotheses_is_that_of_transformers(model, tokens, theirs):
    """Its mean log probability, and the same best one for lists of any length."""
    for number in SOME[:4]:
        expected = by_transformers(theirs, number, num_beams=5, num_return_sequences=5)
        for nbest in (5, 3, 1):
            found = heard(model, tokens, replace(PLAIN, beam=5, nbest=nbest), number)
            assert [ids for ids, _ in found] == expected[:nbest]


def test_hypotheses_are_bounded_by_the_audio_and_not_by_its_window(model, tokens, theirs):
    """75 tokens a second and ten more, of the audio that the window has."""
    whole = {number: by_transformers(theirs, number)[0] for number in SOME}
    number = next(number for number, ids in whole.items() if len(ids) > 25)
    [(found, _)] = heard(model, tokens, PLAIN, number, seconds=0.12)
    assert found == whole[number][: 9 + 10]


def test_the_search_uses_an_adapter_of_the_output_layer(folder, tokens):
    """transformers' model, with the adapter merged by hand, and without it."""
    adapt = {"targets": ["proj_out"], "rank": 2, "alpha": 6.0}
    model = Whisper({"network": "hf", "path": str(folder), "adapt": adapt}, "x", None)
    torch.manual_seed(2)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value))
    low, high = (dict(model.named_parameters())[f"proj_out.lora_{side}"] for side in "ab")
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    # Apart from the table of tokens, which stays.
    weight = whole.proj_out.weight.detach().clone()
    written = []
    for more in (0, 6.0 / 2 * (high @ low).detach()):
        whole.proj_out.weight = torch.nn.Parameter(weight + more)
        written.append([by_transformers(whole, number)[0] for number in SOME[:2]])
    found = [heard(model.eval(), tokens, PLAIN, number)[0][0] for number in SOME[:2]]
    assert found == written[1] != written[0]


def test_samples_are_drawn_by_probability_and_seed(model, tokens, theirs):
    """At low temperatures only the most probable token is, at 1 the first one as often as it is."""
    sampled = replace(PLAIN, logprob_threshold=0.0)
    cold = replace(sampled, temperatures=(1e-4,))
    for number in SOME[:2]:
        assert heard(model, tokens, cold, number, seed=number) == heard(
            model, tokens, PLAIN, number
        )
    warm, draws = replace(sampled, temperatures=(1.0,)), 100
    model.longest = len(PROMPT) + 1
    try:
        drawn = [heard(model, tokens, warm, 0, seed)[0][0] for seed in range(draws)]
        again = [heard(model, tokens, warm, 0, seed)[0][0] for seed in range(5)]
    finally:
        model.longest = LONGEST
    assert again == drawn[:5]
    with torch.no_grad():
        given = {"decoder_input_ids": torch.tensor([PROMPT])}
        chances = theirs(audio(0).transpose(1, 2), **given).logits[0, -1].softmax(0)
    counts = Counter(ids[0] if ids else END for ids in drawn)
    for token, chance in enumerate(chances.tolist()):
        # An expected number of at least two, for which the normal distribution is near enough.
        error = (max(chance, 2 / draws) * (1 - chance) / draws) ** 0.5
        assert abs(counts[token] / draws - chance) <= 4 * error
    assert len(counts) > 3


def test_fallbacks_are_for_what_failed(model, tokens, theirs):
    """Temperatures are tried one after the other; an improbable hypothesis is no speech."""
    [(ids, score)] = heard(model, tokens, PLAIN)
    mean = score / (len(ids) + 1)
    with torch.no_grad():
        given = {"decoder_input_ids": torch.tensor([PROMPT[:1]])}
        chances = theirs(audio(0).transpose(1, 2), **given).logits[0, -1].softmax(0)
    # The token before that of no time stamps, as in every Whisper.
    silence = float(chances[PROMPT[1] - 1])
    given = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = theirs(audio(0).transpose(1, 2), decoder_input_ids=given).logits
    empty = float(logits[0, -1].log_softmax(0)[END])
    above, below = mean + 0.01, mean - 0.01
    often = {"temperatures": (0.5, 1.0)}
    quiet, loud = silence * 0.99, min(1.0, silence * 1.01)
    calm = next(n for n in SOME if not repeats(tokens.decode(heard(model, tokens, PLAIN, n)[0][0])))
    [(fine, total)] = heard(model, tokens, PLAIN, calm)
    likely = total / (len(fine) + 1) - 0.01
    kept = replace(PLAIN, logprob_threshold=likely, **often)
    assert heard(model, tokens, kept, calm, 3) == [(fine, total)]
    # Repeats itself by another measure.
    packed = replace(kept, compression_ratio_threshold=0.1)
    assert heard(model, tokens, packed, calm, 3) != [(fine, total)]
    for least, most, found in (
        (above, quiet, [([], pytest.approx(empty, abs=1e-4))]),
        (above, loud, [(ids, score)]),
        (below, quiet, [(ids, score)]),
        (None, quiet, [([], pytest.approx(empty, abs=1e-4))]),
    ):
        options = replace(PLAIN, logprob_threshold=least, no_speech_threshold=most)
        assert heard(model, tokens, options) == found
    # Silence is not sampled anew.
    options = replace(options, **often)
    assert heard(model, tokens, options)[0][0] == []
