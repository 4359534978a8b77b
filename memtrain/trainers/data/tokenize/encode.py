"""Texts to token ids, and places in the text to places in the tokens, a batch at a time.

Offsets cost a sixth of the time of the tokenizer, so byte-level tokenizers are run without them: the bytes of
each token are known, and their running sum is where it ends. A text whose tokens do not add up to its bytes
(one that was normalised) is encoded again with offsets, as are all texts of other tokenizers. No torch here.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memtrain.trainers.data.tokenize.render import Piece

if TYPE_CHECKING:
    from tokenizers import Encoding

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]
TokenSpan = tuple[int, int]

CHARS_AT_ONCE = 2**21
"""Characters that the tokenizer is given at once: it holds some hundred bytes a token."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one piece."""

    ids: Ids
    cut: int
    """Tokens that lie wholly in the prompt."""
    loss_spans: tuple[TokenSpan, ...]
    """Learnt spans, in tokens."""
    merged: bool
    """Whether a token reaches over the end of the prompt."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The tokens of texts, end to end, and where the prompt of each ends."""

    ids: Ids
    bounds: Ints
    """[T + 1] first token of each text."""
    cuts: Ints
    """[T] tokens of each text that lie wholly in its prompt."""
    merged: NDArray[np.bool_]
    """[T] whether a token reaches over the end of the prompt."""
    normalised: NDArray[np.bool_]
    """[T] whether the tokens do not add up to the text: a normaliser changed it, and the cut is not known."""


def few_at_once(texts: Sequence[str]) -> Iterator[slice]:
    """The texts in stretches of `CHARS_AT_ONCE` characters, or of one text that is longer."""
    first, size = 0, 0
    for at, text in enumerate(texts):
        if at > first and size + len(text) > CHARS_AT_ONCE:
            yield slice(first, at)
            first, size = at, 0
        size += len(text)
    if first < len(texts):
        yield slice(first, len(texts))


def utf8_bytes(text: str, end: int | None = None) -> int:
    """Bytes of `text[:end]` in UTF-8."""
    if text.isascii():
        return len(text) if end is None else end
    return len(text[:end].encode())


def shifted(text: str, origin: int, end: int) -> int:
    """End of `text[:end]` in bytes, when the text begins at `origin`."""
    return origin + utf8_bytes(text, end)


class Encoder:
    """A fast tokenizer without padding or truncation, and facts of its tokens."""

    def __init__(self, tokenizer_json: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.num_tokens = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.num_before, self.num_after = self._added()
        self.token_bytes = self._token_bytes(json.loads(tokenizer_json))

    def _added(self) -> tuple[int, int]:
        """Special tokens that the tokenizer adds before and after a text."""
        bare = self.tokenizer.encode("a", add_special_tokens=False).ids
        whole = self.tokenizer.encode("a", add_special_tokens=True).ids
        for before in range(len(whole) - len(bare) + 1):
            if whole[before : before + len(bare)] == bare:
                return before, len(whole) - len(bare) - before
        return 0, 0

    def _token_bytes(self, config: dict) -> Ints | None:
        """Bytes of text that each token stands for; None where tokens are not made of bytes."""
        if config["model"].get("type") != "BPE" or "ByteLevel" not in json.dumps(config["decoder"] or {}):
            return None
        num_bytes = np.zeros(max(self.tokenizer.get_vocab().values()) + 1, np.int64)
        for token, number in config["model"]["vocab"].items():
            num_bytes[number] = len(token)
        for added in config["added_tokens"]:
            num_bytes[added["id"]] = len(added["content"].encode())
        return num_bytes

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        """The tokens of each piece, in order."""
        encoded: list[Encoded | None] = [None] * len(pieces)
        for adds_specials in (False, True):
            index = [i for i, piece in enumerate(pieces) if piece.adds_specials is adds_specials]
            own = self._encode([pieces[i] for i in index], adds_specials)
            for place, one in zip(index, own, strict=True):
                encoded[place] = self._ended_once(pieces[place], one) if adds_specials else one
        return [one for one in encoded if one is not None]

    def _ended_once(self, piece: Piece, made: Encoded) -> Encoded:
        """Tokens without the tokenizer's own end where the text is a prompt, or ends in that token
        already."""
        length = len(made.ids) - self.num_after
        is_prompt = piece.cut == len(piece.text) and not piece.loss_spans
        if not self.num_after or length < 1:
            return made
        if not is_prompt and made.ids[length - 1] != made.ids[-1]:
            return made
        loss_spans = tuple((start, min(end, length)) for start, end in made.loss_spans if start < length)
        return Encoded(made.ids[:length], min(made.cut, length), loss_spans, made.merged)

    def _encode(self, pieces: list[Piece], adds_specials: bool) -> list[Encoded]:
        if not pieces:
            return []
        texts = [piece.text for piece in pieces]
        if self.token_bytes is None:
            made: list[Encoded] = []
            for some in few_at_once(texts):
                found = self.tokenizer.encode_batch(texts[some], add_special_tokens=adds_specials)
                made += [self._by_offsets(piece, one) for piece, one in zip(pieces[some], found, strict=True)]
            return made
        ids, bounds = self._flat(texts, adds_specials)
        return self._by_bytes(pieces, ids, bounds, adds_specials)

    def _flat(self, texts: list[str], adds_specials: bool) -> tuple[Ids, list[int]]:
        """The tokens of all texts, end to end, and where each begins."""
        flat = array("i")
        bounds = [0]
        for some in few_at_once(texts):
            for one in self.tokenizer.encode_batch_fast(texts[some], add_special_tokens=adds_specials):
                flat.fromlist(one.ids)
                bounds.append(len(flat))
        return np.frombuffer(flat, np.int32), bounds

    @property
    def cuts_by_bytes(self) -> bool:
        """Whether `cut` works: tokens are made of bytes, and none is added at the end."""
        return self.token_bytes is not None and not self.num_after

    def cut(self, texts: list[str], text_bytes: list[int], cut_bytes: list[int]) -> Cuts:
        """The tokens of texts of so many bytes, and where each is cut after so many of them."""
        ids, bounds = self._flat(texts, True)
        return self._cut(ids, self._sums(ids, np.array(bounds), True), bounds, text_bytes, cut_bytes)

    def _sums(self, ids: Ids, ptr: Ints, adds_specials: bool) -> Ints:
        """Bytes of text before each token, and before the end."""
        assert self.token_bytes is not None
        widths = self.token_bytes[ids]
        if adds_specials:
            for before in range(self.num_before):
                widths[ptr[:-1] + before] = 0
            for after in range(self.num_after):
                widths[ptr[1:] - 1 - after] = 0
        sums = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(widths, out=sums[1:])
        return sums

    def _cut(
        self, ids: Ids, sums: Ints, bounds: list[int], text_bytes: list[int], cut_bytes: list[int]
    ) -> Cuts:
        ptr = np.array(bounds)
        base = sums[ptr]
        boundary = base[:-1] + cut_bytes
        cuts = np.searchsorted(sums[1:], boundary, side="right")
        merged = (cuts < ptr[1:]) & (sums[np.minimum(cuts, len(ids))] < boundary)
        normalised = np.diff(base) != text_bytes
        return Cuts(ids, ptr, np.minimum(cuts, ptr[1:]) - ptr[:-1], merged, normalised)

    def _by_bytes(
        self, pieces: list[Piece], ids: Ids, bounds: list[int], adds_specials: bool
    ) -> list[Encoded]:
        """Places in the tokens from the running sum of their bytes."""
        sums = self._sums(ids, np.array(bounds), adds_specials)
        starts, ends, base = sums[:-1], sums[1:], sums[bounds]
        text_bytes = [utf8_bytes(piece.text) for piece in pieces]
        cut_bytes = [utf8_bytes(piece.text, piece.cut) for piece in pieces]
        found = self._cut(ids, sums, bounds, text_bytes, cut_bytes)
        normalised, cuts, merged = found.normalised, found.cuts, found.merged
        known = zip(
            pieces, bounds, bounds[1:], normalised.tolist(), cuts.tolist(), merged.tolist(), strict=False
        )
        encoded: list[Encoded] = []
        for i, (piece, first, last, is_normalised, cut, is_merged) in enumerate(known):
            own = ids[first:last]
            if piece.cut == 0 and piece.loss_spans == ((0, len(piece.text)),):
                before = self.num_before if adds_specials else 0
                encoded.append(
                    Encoded(own, before, ((before, len(own)),) if len(own) > before else (), False)
                )
            elif is_normalised:
                again = self.tokenizer.encode(piece.text, add_special_tokens=adds_specials)
                encoded.append(self._by_offsets(piece, again))
            elif 0 < piece.cut < len(piece.text) and piece.loss_spans == ((piece.cut, len(piece.text)),):
                encoded.append(Encoded(own, cut, ((cut, len(own)),) if len(own) > cut else (), is_merged))
            else:
                place = partial(shifted, piece.text, int(base[i]))
                encoded.append(placed(piece, own, starts[first:last], ends[first:last], place))
        return encoded

    def _by_offsets(self, piece: Piece, encoding: Encoding) -> Encoded:
        """Places in the tokens from the tokenizer's own offsets."""
        ids = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        specials = np.array(encoding.special_tokens_mask, np.bool_)
        if len(ids) and specials[-1] and offsets[-1, 1] == 0:
            offsets[len(ids) - self.num_after :] = len(piece.text)
        starts, ends = np.maximum.accumulate(offsets[:, 0]), np.maximum.accumulate(offsets[:, 1])
        return placed(piece, ids, starts, ends, lambda end: end)


def placed(piece: Piece, ids: Ids, starts: Ints, ends: Ints, place: Callable[[int], int]) -> Encoded:
    """The tokens of a piece with its cut and loss spans in tokens.

    A token that reaches over a boundary belongs to the loss tokens. `place` turns a number of characters into
    the unit of `starts` and `ends`.
    """
    num_tokens, num_chars = len(ids), len(piece.text)
    boundary = place(piece.cut)
    cut = num_tokens if piece.cut == num_chars else int(np.searchsorted(ends, boundary, side="right"))
    loss_spans: list[TokenSpan] = []
    for start, end in piece.loss_spans:
        first = cut if start == piece.cut else int(np.searchsorted(ends, place(start), side="right"))
        last = num_tokens if end == num_chars else int(np.searchsorted(starts, place(end), side="left"))
        if first < last:
            loss_spans.append((first, last))
    merged = cut < num_tokens and bool(starts[cut] < boundary)
    return Encoded(ids, cut, tuple(loss_spans), merged)
