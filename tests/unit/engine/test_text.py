from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from onebudget.core import Request, SamplingParams
from onebudget.devtools.tiny_models import tiny_tokenizer
from onebudget.engine.text import TextBuilder

END = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """Words with their blank, and single bytes for what is not in the vocabulary."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁the", "b", "é", "日"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    inner = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


class Feed:
    """A request whose tokens arrive in the given portions."""

    def __init__(self, tokenizer: Any, *stop: str) -> None:
        self.tokenizer = tokenizer
        self.request = Request(0, [1], SamplingParams(stop=stop), max_new_tokens=999)
        self.builder = TextBuilder(tokenizer, stop)
        self.settled: list[str] = []

    def take(self, *tokens: int) -> str:
        self.request.output_token_ids += tokens
        self.builder.take(self.request)
        self.settled.append(self.builder.settled)
        return self.builder.text

    def text(self, text: str) -> str:
        """One token a call until the text is through or a stop text came."""
        for token in self.tokenizer(text).input_ids:
            self.take(token)
            if self.builder.stopped:
                break
        return self.builder.text

    def assert_nothing_was_taken_back(self) -> None:
        for earlier, later in pairwise([*self.settled, self.builder.text]):
            assert later.startswith(earlier)


def test_text_grows_token_by_token(tokenizer: Any) -> None:
    feed = Feed(tokenizer)
    assert feed.text("Hello, you.") == "Hello, you."
    assert feed.settled == ["Hello, you."[:length] for length in range(1, 12)]


def test_a_character_waits_for_its_last_byte(tokenizer: Any) -> None:
    feed = Feed(tokenizer)
    feed.text("a€😀ü")
    assert feed.settled == ["a", "a", "a", "a€", "a€", "a€", "a€", "a€😀", "a€😀", "a€😀ü"]


def test_several_tokens_at_once(tokenizer: Any) -> None:
    feed = Feed(tokenizer)
    assert feed.take(*tokenizer("one ").input_ids) == "one "
    assert feed.take(*tokenizer("two").input_ids) == "one two"


def test_special_tokens_leave_no_text(tokenizer: Any) -> None:
    feed = Feed(tokenizer)
    hi = tokenizer("hi").input_ids
    assert feed.take(1, hi[0], 0, hi[1], END) == "hi"


def test_ids_the_tokenizer_does_not_know_leave_no_text(tokenizer: Any) -> None:
    """Embeddings are often padded beyond the tokenizer's vocabulary, and a model may draw such an id."""
    feed = Feed(tokenizer)
    feed.text("a")
    assert feed.take(319) == "a"
    assert feed.text("b") == "ab"


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        (("ll",), "hello", "he"),
        (("hello",), "hello", ""),
        (("lo", "ell"), "hello", "h"),
        (("€",), "5€ each", "5"),
        (("\n\n",), "one\n\ntwo", "one"),
        (("aab",), "aaaab!", "aa"),
        (("abac",), "ababac", "ab"),
        (("x", "hello"), "hello", ""),
    ],
)
def test_stop_texts_across_tokens(tokenizer: Any, stop: tuple[str, ...], text: str, kept: str) -> None:
    feed = Feed(tokenizer, *stop)
    assert feed.text(text) == kept
    assert feed.builder.stopped
    assert feed.builder.settled == kept
    feed.assert_nothing_was_taken_back()


def test_a_stop_text_that_does_not_come_changes_nothing(tokenizer: Any) -> None:
    feed = Feed(tokenizer, "hellos", "lo!")
    assert feed.text("hello") == "hello"
    assert not feed.builder.stopped


def test_what_may_become_a_stop_text_is_held_back(tokenizer: Any) -> None:
    feed = Feed(tokenizer, "END")
    feed.text("an EN ENEND")
    assert feed.settled == ["a", "an", "an ", "an ", "an ", "an EN ", "an EN ", "an EN ", *["an EN EN"] * 3]
    assert (feed.builder.text, feed.builder.stopped) == ("an EN EN", True)


def test_the_stop_text_is_found_inside_a_portion(tokenizer: Any) -> None:
    feed = Feed(tokenizer, "stop")
    assert feed.take(*tokenizer("go on, then stop, and no more").input_ids) == "go on, then "


def test_of_several_stop_texts_in_a_portion_the_first_in_the_text_counts(tokenizer: Any) -> None:
    feed = Feed(tokenizer, "later", "soon")
    assert feed.take(*tokenizer("not soon but later").input_ids) == "not "


alphabet = st.sampled_from("abc€é😀 ")
texts = st.text(alphabet, max_size=30)


@given(
    text=texts, stops=st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=3), cuts=st.lists(st.integers(1, 6))
)
def test_any_text_in_any_portions(tokenizer: Any, text: str, stops: list[str], cuts: list[int]) -> None:
    ids = tokenizer(text).input_ids
    feed = Feed(tokenizer, *stops)
    while ids and not feed.builder.stopped:
        size = cuts.pop() if cuts else 1
        feed.take(*ids[:size])
        ids = ids[size:]
    first = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)
    assert feed.builder.stopped == (first is not None)
    if first is None:
        assert feed.builder.text == text
    else:
        ends = [stop for stop in stops if stop in text]
        assert feed.builder.text in {text[: text.index(stop)] for stop in ends}
        assert not any(stop in feed.builder.text for stop in stops)
    feed.assert_nothing_was_taken_back()


@given(st.lists(st.integers(0, 319), max_size=25))
def test_any_bytes_agree_with_the_tokenizer(tokenizer: Any, ids: list[int]) -> None:
    """Bytes that form no character too; only an unfinished end may still be missing."""
    feed = Feed(tokenizer)
    for token in ids:
        feed.take(token)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole.startswith(feed.builder.text)
    assert set(whole[len(feed.builder.text) :]) <= {"�"}
    feed.assert_nothing_was_taken_back()


def test_bytes_that_form_no_character_beside_words(sentencepiece: Any) -> None:
    feed = Feed(sentencepiece)
    ids = [3 + 0x77, 3 + 0xE3, 1, 1, 3 + 0xF1, 3 + 0x9F, sentencepiece.convert_tokens_to_ids("é")]
    for token in ids:
        feed.take(token)
    # Decoded whole, the bad bytes swallow the "w" before them; what was given out stays given out.
    assert feed.builder.text.startswith("w")
    feed.assert_nothing_was_taken_back()


@given(st.text(st.sampled_from("ab é日the€"), max_size=20))
def test_text_of_a_vocabulary_with_byte_fallback(sentencepiece: Any, text: str) -> None:
    feed = Feed(sentencepiece)
    ids = [token for character in text for token in _pieces(sentencepiece, character)]
    for token in ids:
        feed.take(token)
    assert feed.builder.text == sentencepiece.decode(ids)
    feed.assert_nothing_was_taken_back()


def _pieces(tokenizer: Any, character: str) -> list[int]:
    piece = tokenizer.convert_tokens_to_ids("▁" if character == " " else character)
    return [piece] if piece else [3 + byte for byte in character.encode()]
