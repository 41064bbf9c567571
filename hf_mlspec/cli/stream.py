"""How does a text appear while it is being written?"""

from __future__ import annotations

from bisect import bisect_right
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..integration.call import last_stats
from ..integration.compare import Comparison, accumulate
from ..integration.stream.events import TextPieces
from ..integration.stream.shown import Palette
from .tables import LEVEL_COLUMNS, level_rows, table


class TextStream:
    """A streamer for generate: prints the text as soon as its tokens are committed.

    The prompt is printed with the first piece, because the call may still fail before it.
    """

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self.console, self.tokenizer = console, tokenizer
        self._forget()

    def put(self, value: Any) -> None:
        """Token ids, int64 of any shape; the first call of a text carries its prompt."""
        tokens = value.flatten().tolist()
        if self.prompt is None:
            self.prompt = self.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
            self.written = self.pieces.add(tokens)
        else:
            self._add(tokens)
            if self.written and self.written != (self.text or self.prompt):  # else in the middle of a character
                self._show(self.written)

    def end(self) -> None:
        self.written += self.pieces.rest()
        if not self.text or self.written != self.text:  # nothing but special tokens followed it; half a character
            self._show(self.written)
        self.finish()
        self._forget()

    def close(self) -> None:
        """Leave the terminal as it was, wherever the text stopped."""
        if self.text:
            self.finish()

    def write(self, piece: str) -> None:
        self.console.file.write(piece)
        self.console.file.flush()

    def finish(self) -> None:
        self.console.file.write("\n\n")

    def _add(self, tokens: list[int]) -> None:
        self.written += self.pieces.add(tokens)

    def _show(self, text: str) -> None:
        self.text, piece = text, text[len(self.text) :]
        self.write(piece)

    def _forget(self) -> None:
        self.pieces = TextPieces(self.tokenizer)
        self.written = self.text = ""  # decoded, and shown
        self.prompt: str | None = None


class MarkedStream(TextStream):
    """The same with a line before the prompt and one before what was written, for output without bold letters."""

    def _show(self, text: str) -> None:
        if not self.text:
            prompt = self.prompt or ""
            self.write(f"-- prompt:\n{prompt}\n-- continuation:\n")
            self.text = prompt
        super()._show(text)


class LiveTable(TextStream):
    """The same on a terminal, each token in the colour of the level that drafted it, with the counts of every level
    below the text, renewed with each round."""

    def __init__(self, console: Console, tokenizer: Any, model: Any) -> None:
        super().__init__(console, tokenizer)
        self.palette = Palette()
        self.model, self.finished = model, Comparison().speculation
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def put_levels(self, levels: list[str | None]) -> None:
        """Of the tokens of the next call of `put`; None: the target's own."""
        self.coming = levels

    def _add(self, tokens: list[int]) -> None:
        for token, level in zip_longest(tokens, self.coming[: len(tokens)]):
            super()._add([token])
            self.spans.append((len(self.written), level))

    def close(self) -> None:
        self.live.stop()

    def write(self, piece: str) -> None:
        if not self.live.is_started:
            self.live.start()
        counts = Comparison().speculation
        current = last_stats(self.model) if len(self.text) > len(self.prompt or "") else None
        for part in (self.finished, current):
            if part is not None and part.levels:
                accumulate(counts, part)
        drawn = table("", LEVEL_COLUMNS, level_rows(counts.levels))
        room = max(3, self.console.height - len(counts.levels) - 7)
        lines = self._styled(self._page(room)).wrap(self.console, self.console.width)[-room:]
        self.live.update(Group(Text("\n").join(lines), self.palette.legend(), drawn), refresh=True)

    def finish(self) -> None:
        self.live.stop()
        self.console.print(self._styled(), soft_wrap=True)
        self.console.print(self.palette.legend())
        self.console.print()
        if (stats := last_stats(self.model)) is not None:
            accumulate(self.finished, stats)

    def _page(self, lines: int) -> int:
        """From where on the text fills so many lines: it moves a page at a time, to the beginning of a line where one
        begins, so that lines break where they did."""
        size = lines * self.console.width
        page = max(0, len(self.text) // size - 1) * size
        return self.text.find("\n", page, max(page, len(self.text) - size)) + 1 or page

    def _styled(self, begin: int = 0) -> Text:
        """The text from a place on."""
        prompt = self.prompt or ""
        shown, begin = Text(prompt[begin:], style="dim"), max(begin, len(prompt))
        for end, level in self.spans[bisect_right(self.spans, begin, key=itemgetter(0)) :]:
            shown.append(self.text[begin:end], style="not dim bold " + self.palette.style(level))
            begin = end
        return shown.append(self.text[begin:], style="not dim bold")

    def _forget(self) -> None:
        super()._forget()
        self.spans: list[tuple[int, str | None]] = []  # of every new token: where its text ends, who drafted it
        self.coming: list[str | None] = []
