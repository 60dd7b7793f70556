"""What a run looks like from inside, drawn in a terminal: answers as they are denoised, a map of each.

`Watch` and `Trace` listen to the engine's events, as everything in generate.py does: an object with `event`
and `end`. To be rid of both, delete this file, chat.py, whose live view is a `Watch`, and the lines of
generate.py and cli/options.py that name them. Checked: tests/test_terminal.py.
"""
import shutil
import sys
import time
import unicodedata
from itertools import groupby

PAUSE = 0.01            # seconds after each drawing: slow enough to see


class Watch:
    """The answers on their way, one line each, drawn over themselves; a finished one stays above them."""

    def __init__(self, requests: list, decode, mask_id: int):
        self.requests, self.decode, self.mask_id = requests, decode, mask_id
        self.running, self.drawn = {}, 0        # index -> token or None for each place; lines on the screen
        self.slept = 0.0                        # seconds, which are no work of the engine's
        self.shade = "░" if can_show("░") else "_"

    def event(self, event) -> None:
        """Take in what was committed, and draw."""
        canvas = self.running.setdefault(event.index, self.at_first(self.requests[event.index]))
        for place, token in event.committed:
            canvas[place] = token
        columns, lines = shutil.get_terminal_size()
        finished = []
        if event.result:
            finished = [self.line(event.index, columns)]
            del self.running[event.index]
        self.draw(finished, self.lines(columns, lines - 1), lines - 1)
        time.sleep(PAUSE)
        self.slept += PAUSE

    def at_first(self, request) -> list:
        """A token, or None, for each place."""
        if request.canvas is None:
            return [None] * request.gen_length
        return [None if token == self.mask_id else token for token in request.canvas]

    def lines(self, columns: int, room: int) -> list[str]:
        """The running answers, in at most `room` lines: what cannot be reached can not be drawn over."""
        shown = list(self.running)
        if len(shown) <= room:
            return [self.line(index, columns) for index in shown]
        more = f"      and {len(shown) - room + 1} more"
        return [self.line(index, columns) for index in shown[:room - 1]] + [cut(more, columns)][:room]

    def draw(self, finished: list[str], running: list[str], room: int) -> None:
        """Write over the running lines of the last time; the finished ones will not be written over again."""
        up = min(self.drawn, room)
        sys.stdout.write(f"\033[{up}F" if up > 0 else "")
        sys.stdout.write("".join(f"\033[K{line}\n" for line in finished + running))
        sys.stdout.flush()
        self.drawn = len(running)

    def line(self, index: int, columns: int) -> str:
        return cut(f"{index + 1:4}  {self.text(index)}", columns)

    def text(self, index: int) -> str:
        """Neighbours are decoded together: alone, the bytes of one letter are none."""
        parts = []
        for decided, group in groupby(self.running[index], lambda token: token is not None):
            tokens = list(group)
            parts.append(self.decode(tokens) if decided else self.shade * len(tokens))
        return "".join(c for c in " ".join("".join(parts).split()) if unicodedata.category(c) != "Cc")

    def end(self) -> None:
        print()


def can_show(text: str) -> bool:
    """Whether standard output has these letters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def width(letter: str) -> int:
    """Columns of a terminal, at most: 2 for CJK and emoji, 0 for accents and joiners."""
    if letter == "\ufe0f":                      # makes an emoji of the sign before it
        return 1
    if unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """As much of `text` as so many columns hold."""
    for place, letter in enumerate(text):
        columns -= width(letter)
        if columns < 0:
            return text[:place]
    return text


class Trace:
    """Layers x steps of each request: where the prefix rows were computed and where their K/V were read."""

    def __init__(self, requests: list, layers: int):
        self.layers = layers
        self.columns = [[] for _ in requests]           # a text for each step, a letter for each layer
        self.rows = [[] for _ in requests]              # the request's own rows computed at each step

    def event(self, event) -> None:
        lo, hi = event.computed
        self.columns[event.index].append("".join(letter(event, layer) for layer in range(self.layers)))
        self.rows[event.index].append(hi - lo)

    def end(self) -> None:
        for number, (columns, rows) in enumerate(zip(self.columns, self.rows), 1):
            print(f"request {number}: {len(columns)} steps, from left to right")
            for layer in reversed(range(self.layers)):
                print(f"  layer {layer:3} " + "".join(column[layer] for column in columns))
            print(f"  own rows  {rows[0]} at first, {min(rows)} to {max(rows)} a step, in every layer")
            print("  prefix: # computed  s read from shared pages  p read from private pages  . none\n")


def letter(event, layer: int) -> str:
    """What a step did with the prefix in one layer; `Trace.end` explains the letters."""
    if not event.prefix_tokens:
        return "."
    if layer < event.depth:
        return "s"
    return "#" if event.refresh else "p"
