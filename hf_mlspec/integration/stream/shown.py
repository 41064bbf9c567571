"""What does a stream look like while it writes: each token in the colour of the level that drafted it?

In a notebook as HTML, on a terminal by rich. The colours are those of the server's page.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .events import NewTokens, TextPieces
from .request import Completion

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

_TARGET = "the target"
_BACKGROUNDS = "transparent", "#f5a62366", "#3c9dff66", "#5fc35f66", "#c86bdc66"  # as in serving/page/page.css
_STYLES = "", "on dark_orange3", "on dodger_blue3", "on green4", "on medium_purple4"
_EVERY = 0.1  # seconds between two pictures


class Palette:
    """A colour for every level. levels: their names in the order in which they were first seen."""

    def __init__(self) -> None:
        self.levels = [_TARGET]

    def number(self, level: str | None) -> int:
        """Of the level's colour; None: the target itself."""
        name = level or _TARGET
        if name not in self.levels:
            self.levels.append(name)
        return min(self.levels.index(name), len(_STYLES) - 1)

    def style(self, level: str | None) -> str:
        """For rich."""
        return _STYLES[self.number(level)]

    def background(self, level: str | None) -> str:
        """For HTML."""
        return _BACKGROUNDS[self.number(level)]

    def legend(self) -> Text:
        """The names in their colours."""
        from rich.text import Text

        return Text(" ").join(Text(level, style=self.style(level)) for level in self.levels)


class Shown:
    """The texts of the requests of a stream, by level.

    tokenizer: the target's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._palette = tokenizer, Palette()
        self._rows: dict[int, list[tuple[str, str]]] = {}  # pieces of text and who drafted them, by id() of a request
        self._ends: dict[int, str] = {}
        self._pieces: dict[int, TextPieces] = {}
        self._requests: list[Any] = []  # an id() is nobody else's while its object lives

    def add(self, event: NewTokens | Completion) -> None:
        """What a stream yielded."""
        if not isinstance(event, NewTokens | Completion):
            raise TypeError(f"{type(event).__name__} is nothing that generate_stream yields: pass "
                            "generate_stream(..., events=True)")
        key = id(event.request)
        if key not in self._rows:
            self._requests.append(event.request)
            self._rows[key], self._pieces[key] = [], TextPieces(self.tokenizer)
        row, pieces = self._rows[key], self._pieces[key]
        if isinstance(event, NewTokens):
            for token, level in zip(event.tokens, event.levels, strict=True):
                self._palette.number(level)  # colours in the order in which levels come
                row.append((pieces.add([token]), level or _TARGET))
            return
        row.append((pieces.rest(), row[-1][1] if row else _TARGET))
        self._ends[key] = _end(event)

    def texts(self) -> list[str]:
        """Of every request, in the order in which they began."""
        return ["".join(text for text, _ in row) for row in self._rows.values()]

    def _repr_html_(self) -> str:
        def mark(text: str, level: str) -> str:
            colour = self._palette.background(level)
            return f'<span title="{html.escape(level)}" style="background:{colour}">{html.escape(text)}</span>'

        legend = " ".join(mark(level, level) for level in self._palette.levels)
        rows = []
        for key, row in self._rows.items():
            spans = "".join(mark(text, level) for text, level in row if text)
            rows.append(f'<pre style="white-space:pre-wrap">{spans}</pre><small>{html.escape(self._ends.get(key, ""))}'
                        "</small>")
        return f"<div><p>{legend}</p>{''.join(rows)}</div>"

    def __rich__(self) -> Text:
        found = self._palette.legend()
        for key, row in self._rows.items():
            found.append("\n\n")
            for text, level in row:
                found.append(text, style=self._palette.style(level))
            found.append(f"\n{self._ends.get(key, '')}", style="dim")
        return found


def show_levels(events: Iterable[NewTokens | Completion], tokenizer: Any) -> Iterator[NewTokens | Completion]:
    """Yield what `generate_stream(..., events=True)` does, and show the texts as they grow, each token in the colour
    of the level that drafted it: in a notebook below its cell, elsewhere on the terminal.

    tokenizer: the target's.
    """
    shown, drawn = Shown(tokenizer), 0.0
    picture = _notebook(shown) or _Terminal(shown)
    try:
        for event in events:
            shown.add(event)
            if (now := time.monotonic()) - drawn >= _EVERY:
                drawn = now
                picture.update(shown)
            yield event
    finally:
        picture.stop(shown)


class _Cell:
    """A place below the cell of a notebook."""

    def __init__(self, shown: Shown) -> None:
        from IPython.display import display

        self._handle = display(shown, display_id=True)

    def update(self, shown: Shown) -> None:
        self._handle.update(shown)

    def stop(self, shown: Shown) -> None:
        """It stays as it is then."""
        self.update(shown)


def _notebook(shown: Shown) -> _Cell | None:
    """None outside of a notebook: IPython is loaded in one, and has a kernel."""
    found = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return _Cell(shown) if hasattr(found, "kernel") else None


class _Terminal:
    """The lines of a terminal from here on."""

    def __init__(self, shown: Shown) -> None:
        from rich.live import Live

        self._live = Live(_Tail(shown), auto_refresh=False)
        self._live.start()

    def update(self, shown: Shown) -> None:
        self._live.update(_Tail(shown), refresh=True)

    def stop(self, shown: Shown) -> None:
        self._live.update(shown)
        self._live.stop()


class _Tail:
    """The last lines, as many as the screen has: those above have left it, and cannot be drawn again."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for line in console.render_lines(self._shown, options, pad=False)[-console.height :]:
            yield from line
            yield Segment.line()


def _end(done: Completion) -> str:
    """What is said of a request that ended."""
    if done.error is not None:
        return f"{done.finish_reason}: {done.error}"
    stats = done.speculation
    if stats is None or not stats.target_passes:
        return done.finish_reason
    return (f"{stats.new_tokens} tokens in {stats.target_passes} passes of the target: "
            f"{stats.new_tokens / stats.target_passes:.2f} tokens per pass")
