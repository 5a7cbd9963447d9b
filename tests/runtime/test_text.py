"""Streamed text is the text: nothing split, nothing lost, no stop string and nothing past it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from runtime.request import InvalidRequest
from runtime.text import Detokenizer, StopMatch, StopMatcher, Tokenizer
from tests.helpers import make_tiny_tokenizer

REPLACEMENT = "\ufffd"


def save(tokenizer: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    tokenizer.add_tokens(["<added>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def byte_level(folder: Path) -> Tokenizer:
    """All 256 bytes, and merged tokens that hold spaces, part of a character, or both."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    letter_of = dict(zip("aé€🙂 ", map(_byte_letters, "aé€🙂 "), strict=True))
    merged = [
        letter_of[" "] + letter_of["a"],
        letter_of["€"][:2],
        letter_of["🙂"][1:3],
        letter_of["é"],
        letter_of[" "] + letter_of["🙂"][:1],
    ]
    merges = []
    for word in merged:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return save(tokenizer, folder)


def _byte_letters(text: str) -> str:
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(word for word, _ in pre.pre_tokenize_str(text))


def sentence_piece(folder: Path, decoder: decoders.Decoder) -> Tokenizer:
    """Words with a space mark before them, and 256 byte tokens for all other characters."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "é", "▁a", "▁▁", "▁▁b", REPLACEMENT]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "▁"), ("▁▁", "b")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoder
    return save(tokenizer, folder)


LLAMA_DECODER = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


@pytest.fixture(scope="module", params=["byte_level", "sentence_piece", "metaspace"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "byte_level":
        return byte_level(folder)
    chain = LLAMA_DECODER
    if request.param == "metaspace":
        chain = [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    return sentence_piece(folder, decoders.Sequence(chain))


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, with runs that spell characters, their beginnings, and bytes that are none."""
    raw = tokenizers.Tokenizer.from_file(str(tokenizer._folder / "tokenizer.json"))
    size = raw.get_vocab_size()
    spelled = [
        raw.encode(text, add_special_tokens=False).ids for text in ("€", "🙂", "é", "a a", "  b")
    ]
    pieces = [ids[:end] for ids in spelled for end in range(1, len(ids) + 1)]
    special = [raw.token_to_id("<eos>"), raw.token_to_id("<pad>"), raw.token_to_id("<added>")]
    unknown = size + 3  # models pad their vocabulary: such an id has no text
    some = st.one_of(
        st.sampled_from(pieces),
        st.sampled_from(special).map(lambda i: [i]),
        st.integers(0, size - 1).map(lambda i: [i]),
        st.just([unknown]),
    )
    return st.lists(some, max_size=12).map(lambda parts: list(itertools.chain(*parts)))


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The pieces, the flush last."""
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_concatenate_to_the_full_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Lost spaces and broken characters, whatever the tokens and wherever special ones stand."""
    ids = data.draw(token_ids(tokenizer))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_that_was_sent_stays_right_however_the_answer_goes_on(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Half a character sent as U+FFFD would be wrong as soon as its other half arrives."""
    ids = data.draw(token_ids(tokenizer))
    detokenizer = Detokenizer(tokenizer)
    sent = ""
    full = tokenizer.decode(ids)
    for i in ids:
        sent += detokenizer.push(i)
        assert full.startswith(sent)
        assert not sent.endswith(REPLACEMENT)


def test_every_character_is_sent_with_its_last_token(tmp_path: Path) -> None:
    """Held back is what may still change, not more."""
    tokenizer = byte_level(tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = raw.encode("a 🙂€é").ids
    assert stream(tokenizer, ids) == ["a", "", "", " 🙂", "", "€", "é", ""]


def test_an_incomplete_tail_comes_with_the_flush(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = raw.encode("a€").ids[:-1]
    assert stream(tokenizer, ids) == ["a", "", REPLACEMENT]


def test_byte_tokens_wait_for_the_end_of_their_run(tmp_path: Path) -> None:
    """One wrong byte turns the whole run into U+FFFD, the characters before it included."""
    tokenizer = sentence_piece(tmp_path, decoders.Sequence(LLAMA_DECODER))
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    euro, wrong, a = raw.encode("€").ids, raw.token_to_id("<0xFF>"), raw.token_to_id("▁a")
    eos = raw.token_to_id("<eos>")
    assert stream(tokenizer, [*euro, a]) == ["", "", "", "€ a", ""]
    assert stream(tokenizer, [*euro, eos, wrong, a]) == [""] * 5 + [REPLACEMENT * 4 + " a", ""]


def test_spaces_survive_a_decoder_that_strips_the_first(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path, decoders.Sequence(LLAMA_DECODER))
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    a, space, eos = (raw.token_to_id(t) for t in ("▁a", "▁", "<eos>"))
    assert stream(tokenizer, [a, a, space, eos, a]) == ["a", " a", " ", "", " a", ""]


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_tokenizer(folder)
    return Tokenizer.load(folder)


class TestPrompts:
    def test_raw_prompts_round_trip(self, chat_tokenizer: Tokenizer) -> None:
        text = "  the dog\n\n€ 🙂 "
        assert chat_tokenizer.decode(chat_tokenizer.encode_prompt(text, True, 100)) == text
        assert chat_tokenizer.decode(chat_tokenizer.encode_prompt(text.encode(), True, 100)) == text

    def test_chat_prompts_are_one_user_message(self, chat_tokenizer: Tokenizer) -> None:
        ids = chat_tokenizer.encode_prompt("the dog", False, 100)
        expected = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
        assert ids == chat_tokenizer.encode_prompt(expected, True, 100)
        assert chat_tokenizer.has_chat_template

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the prompt is empty: it must hold at least 1 character"),
            (b"", "the prompt is empty: it must hold at least 1 character"),
            ("x" * 101, "the prompt may have at most 100 bytes, got 101"),
            ("€" * 34, "the prompt may have at most 100 bytes, got 102"),
            (b"\xff\xfe", "the prompt is not valid UTF-8"),
            ("a\ud800", "the prompt is not valid UTF-8"),
        ],
    )
    @pytest.mark.parametrize("raw_prompt", [True, False])
    def test_refusals_name_limit_and_value(
        self, chat_tokenizer: Tokenizer, prompt: str | bytes, message: str, raw_prompt: bool
    ) -> None:
        with pytest.raises(InvalidRequest, match=message):
            chat_tokenizer.encode_prompt(prompt, raw_prompt, 100)

    def test_a_folder_without_a_tokenizer_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json"):
            Tokenizer.load(tmp_path)

    def test_saved_padding_and_truncation_do_not_apply(self, tmp_path: Path) -> None:
        """Some published tokenizer.json files truncate to 512 tokens or pad: prompts must not."""
        byte_level(tmp_path)
        raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        raw.enable_truncation(2)
        raw.enable_padding(length=8)
        raw.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer.load(tmp_path)
        assert len(tokenizer.encode_prompt("abc", True, 100)) == 3


# Stop strings


def cut(text: str, words: tuple[str, ...]) -> tuple[str, bool]:
    """Reference: read character by character until some stop string is complete; drop it."""
    for end in range(len(text) + 1):
        found = [word for word in words if text[:end].endswith(word)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


def certain(text: str, words: tuple[str, ...]) -> str:
    """Reference: what every continuation of a text without a stop string has in common.

    Only continuations that complete a stop string at once, and one that completes none, differ.
    """
    futures = [text]
    for word in words:
        for overlap in range(1, len(word)):
            if text.endswith(word[:overlap]):
                futures.append(cut(text + word[overlap:], words)[0])
    shared = min(futures, key=len)
    assert all(future.startswith(shared) for future in futures)
    return shared


words = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)
pieces = st.lists(st.text("ab", max_size=5), max_size=12)


def run(matcher: StopMatcher, parts: list[str]) -> tuple[str, bool]:
    sent = ""
    for part in parts:
        match = matcher.push(part)
        sent += match.text
        if match.stopped:
            return sent, True
    return sent + matcher.flush(), False


@settings(max_examples=300, deadline=None)
@given(words=words, parts=pieces)
def test_the_sent_text_ends_before_the_first_stop_string_to_complete(
    words: tuple[str, ...], parts: list[str]
) -> None:
    assert run(StopMatcher(words), parts) == cut("".join(parts), words)


@settings(max_examples=300, deadline=None)
@given(words=words, parts=pieces)
def test_what_is_held_back_is_the_least_possible(words: tuple[str, ...], parts: list[str]) -> None:
    """After every piece exactly the text that no continuation can take back has been sent."""
    matcher, text, sent = StopMatcher(words), "", ""
    for part in parts:
        text += part
        match = matcher.push(part)
        sent += match.text
        expected, stopped = cut(text, words)
        assert match.stopped == stopped
        if stopped:
            assert sent == expected
            return
        assert sent == certain(text, words)


def test_the_split_into_pieces_never_shows() -> None:
    """A stop string across token borders is where the others missed it."""
    text, words = "one END two", ("END", "ND t")
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        parts = [text[:first], text[first:second], text[second:]]
        assert run(StopMatcher(words), parts) == ("one ", True)


@pytest.mark.parametrize(
    ("words", "parts", "expected"),
    [
        ((), ["a", "b"], [("a", False), ("b", False)]),
        (("ab",), ["a", "b"], [("", False), ("", True)]),
        (("ab",), ["xa", "a", "c"], [("x", False), ("a", False), ("ac", False)]),
        (("abc", "bc"), ["abc"], [("", True)]),  # both complete at once: the longer one is dropped
        (("abcd", "bc"), ["ab", "c"], [("a", False), ("", True)]),
        (("abc", "b"), ["a", "b"], [("a", False), ("", True)]),  # "abc" can never come first
        (("aab",), ["aa", "a", "b"], [("", False), ("a", False), ("", True)]),
    ],
)
def test_examples(
    words: tuple[str, ...], parts: list[str], expected: list[tuple[str, bool]]
) -> None:
    matcher = StopMatcher(words)
    assert [matcher.push(part) for part in parts] == [StopMatch(*e) for e in expected]


def test_a_flush_gives_the_held_text_once() -> None:
    matcher = StopMatcher(("stop",))
    assert matcher.push("a sto") == StopMatch("a ", False)
    assert matcher.flush() == "sto"
    assert matcher.flush() == ""
