"""Generation: the cache, sampling, stop texts, whole characters and the context's border."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from builders import tiny_gpt
from lmforge.config.errors import UsageError
from lmforge.data.tokenizer import Tokenizer
from lmforge.models.gpt import Cache
from lmforge.tasks import generation
from lmforge.tasks.generation import Sampling, choose, encode_prompt, generate_ids, stream_text
from ranks import run_ranks

GREEDY = Sampling(temperature=0.0)
PROMPT = [5, 9, 2, 7]


def ids(
    network: torch.nn.Module, prompt: list[int], most: int, sampling: Sampling = GREEDY, **options: int
) -> list[int]:
    settings = {"seed": 0, "end": None, "vocabulary": 64, **options}
    return list(generate_ids(network, prompt, most, sampling, **settings))


def greedy_without_cache(network: torch.nn.Module, prompt: list[int], most: int) -> list[int]:
    known = list(prompt)
    for _ in range(most):
        known.append(int(network(torch.tensor([known]))[0, -1].argmax()))
    return known[len(prompt) :]


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    """One that does not repeat itself and whose choices hang on what it attends to."""
    return tiny_gpt(seed=1, scale=10.0, tied=False)


def test_greedy_with_a_cache_is_greedy_without(network, monkeypatch) -> None:
    expected = greedy_without_cache(network, PROMPT, 20)
    assert len(set(expected)) > 3
    assert ids(network, PROMPT, 20) == expected

    class Mixed(Cache):
        def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = super().extend(layer, k, v)
            return keys.roll(1, 2), values

    monkeypatch.setattr(generation, "Cache", Mixed)
    assert ids(network, PROMPT, 20) != expected


def test_the_same_seed_gives_the_same_ids_and_training_randomness_is_untouched(network) -> None:
    sampling = Sampling(temperature=1.0)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = ids(network, PROMPT, 20, sampling, seed=1)
    assert torch.get_rng_state().equal(before)
    torch.rand(3)
    assert ids(network, PROMPT, 20, sampling, seed=1) == first
    assert ids(network, PROMPT, 20, sampling, seed=2) != first


def test_the_end_mark_ends_and_is_not_given_out(network) -> None:
    free = ids(network, PROMPT, 20)
    end = free[5]
    assert ids(network, PROMPT, 20, end=end) == list(itertools.takewhile(lambda token: token != end, free))


def test_padding_rows_are_never_drawn() -> None:
    network = tiny_gpt(vocab_size=128)
    with torch.no_grad():
        network.embed.weight[60:] *= 1e4
    assert max(ids(network, PROMPT, 25, Sampling(1.0), vocabulary=60)) < 60
    assert max(ids(network, PROMPT, 25, Sampling(1.0), vocabulary=128)) >= 60


@pytest.mark.parametrize(("length", "expected"), [(30, 2), (31, 1), (32, 0), (1, 10)])
def test_generation_ends_at_the_contexts_border(network, length, expected) -> None:
    assert len(ids(network, [1] * length, 10)) == expected


@pytest.mark.parametrize("length", [0, 33, 40])
def test_what_does_not_fit_is_refused_with_both_numbers(network, length) -> None:
    with pytest.raises(UsageError, match=f"{length} tokens.* 32"):
        ids(network, [1] * length, 10)


LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))


def drawn(sampling: Sampling, draws: int = 4000, logits: Tensor = LOGITS) -> Tensor:
    """Share of each id among many draws."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.tensor([choose(logits, sampling, generator) for _ in range(draws)]), minlength=4)
    return counts / draws


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.1, 0.4, 0.3, 0.2]),
        (Sampling(0.5), [1 / 30, 16 / 30, 9 / 30, 4 / 30]),
        (Sampling(0.0), [0, 1, 0, 0]),
        (Sampling(1.0, top_k=1), [0, 1, 0, 0]),
        (Sampling(1.0, top_k=2), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(1.0, top_k=10), [0.1, 0.4, 0.3, 0.2]),
        (Sampling(1.0, top_p=0.35), [0, 1, 0, 0]),
        (Sampling(1.0, top_p=0.6), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(1.0, top_p=1.0), [0.1, 0.4, 0.3, 0.2]),
        (Sampling(1.0, top_k=2, top_p=0.5), [0, 1, 0, 0]),
    ],
)
def test_ids_are_drawn_with_the_stated_odds(sampling, expected) -> None:
    found = drawn(sampling)
    assert found.tolist() == pytest.approx(expected, abs=0.03)
    assert all(share == 0 for share, odds in zip(found.tolist(), expected, strict=True) if odds == 0)


def test_low_precision_logits_are_drawn_from_in_float32() -> None:
    assert torch.equal(
        drawn(Sampling(1.0), 200, LOGITS.bfloat16().float()), drawn(Sampling(1.0), 200, LOGITS.bfloat16())
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat\n" * 20, "def f(x):\n    return x\n" * 20], 300)


def pieces(tokenizer: Tokenizer, text: str, stop: str | None = None) -> list[str]:
    return list(stream_text(tokenizer, iter(tokenizer.encode(text)), stop))


@pytest.mark.parametrize("text", ["the cat sat", "naïve 漢字 \U0001f469\u200d\U0001f467!", "", "\ttab\r\n"])
def test_streamed_pieces_make_the_text(tokenizer, text) -> None:
    assert "".join(pieces(tokenizer, text)) == text


def test_a_character_is_held_back_until_it_is_whole(tokenizer) -> None:
    parts = [piece for piece in pieces(tokenizer, "a漢b\U0001f469c") if piece]
    assert len(tokenizer.encode("漢")) > 1
    assert parts == ["a", "漢", "b", "\U0001f469", "c"]


def test_a_character_that_never_becomes_whole_is_shown_as_such(tokenizer) -> None:
    broken = tokenizer.encode("漢")[:-1]
    assert "".join(stream_text(tokenizer, iter(broken))) == "\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("the cat sat on the mat", "sat", "the cat "),
        ("the cat sat on the mat", "t s", "the ca"),
        ("the cat sat on the mat", "the", ""),
        ("the cat sat", "dog", "the cat sat"),
        ("the cat", "cats", "the cat"),
        ("aab", "ab", "a"),
        ("x\n\n\ny", "\n\n", "x"),
        ("a漢字b", "字", "a漢"),
    ],
)
def test_the_text_ends_before_the_stop_also_where_it_spans_tokens(tokenizer, text, stop, expected) -> None:
    given = pieces(tokenizer, text, stop)
    assert "".join(given) == expected
    shown = "".join(itertools.accumulate(given))
    assert stop not in shown.replace(text, "")


def test_nothing_of_a_stop_is_shown_before_it_is_whole(tokenizer) -> None:
    shown = ""
    for piece in pieces(tokenizer, "the cat sat", stop="cat sat on"):
        shown += piece
        assert shown == "the cat sat" or not shown.endswith(("c", "ca", "cat", "cat ", "cat s"))


def test_after_the_stop_no_more_is_computed(tokenizer) -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for token in tokenizer.encode("the cat sat on the mat"):
            taken.append(token)
            yield token

    list(stream_text(tokenizer, source(), "cat"))
    assert len(taken) < len(tokenizer.encode("the cat sat on the mat"))


def test_a_prompt_starts_with_the_begin_mark(tokenizer) -> None:
    assert encode_prompt(tokenizer, "the cat", 32, keep_end=False) == [tokenizer.bos, *tokenizer.encode("the cat")]


def test_a_prompt_without_room_for_one_more_token_is_refused_or_keeps_its_end(tokenizer) -> None:
    text = "x" * 31
    whole = [tokenizer.bos, *tokenizer.encode(text)]
    assert len(whole) == 32
    assert encode_prompt(tokenizer, text, 33, keep_end=False) == whole
    with pytest.raises(UsageError, match=r"32 tokens.* context is 32"):
        encode_prompt(tokenizer, text, 32, keep_end=False)
    assert encode_prompt(tokenizer, text, 32, keep_end=True) == whole[-31:]
    assert encode_prompt(tokenizer, text + "yz", 32, keep_end=True) == [*whole, *tokenizer.encode("yz")][-31:]


def drawn_with_other_weights(shared: bool) -> list[int]:
    """A rank whose logits differ from the other ranks', far more than by rounding."""
    torch.distributed.init_process_group("gloo")
    if not shared:
        generation._shared = lambda draw, device: draw()
    return ids(tiny_gpt(seed=torch.distributed.get_rank(), scale=10.0), PROMPT, 12, Sampling(1.0))


def test_ranks_go_on_with_the_same_tokens_even_when_their_logits_differ() -> None:
    first, second = run_ranks(drawn_with_other_weights, 2, True)
    assert first == second == ids(tiny_gpt(seed=0, scale=10.0), PROMPT, 12, Sampling(1.0))
    first, second = run_ranks(drawn_with_other_weights, 2, False)
    assert first != second
