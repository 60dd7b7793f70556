"""What a run looks like from inside, drawn in a terminal: the answers as they are denoised, and the map of a request's work.

`Watch` and `Trace` listen to the engine's events, as everything in generate.py does: an object with `event` and `end`. To be
rid of both, delete this file and the lines of generate.py that name it. Checked: tests/test_generate.py.
"""
import shutil
import sys
import time

PAUSE = 0.01            # seconds after each drawing: slow enough to see


class Watch:
    """The answers on their way, one line each, drawn over themselves; a finished one stays above them."""

    def __init__(self, requests: list, decode):
        self.requests, self.decode = requests, decode
        self.running, self.drawn = {}, 0        # index -> token or None for each place, lines on the screen
        self.slept = 0.0                        # seconds, which are no work of the engine's

    def event(self, event) -> None:
        """Take in what was committed, and draw."""
        canvas = self.running.setdefault(event.index, [None] * self.requests[event.index].gen_length)
        for place, token in event.committed:
            canvas[place] = token
        finished = [self.line(event.index)] if event.result else []
        if event.result:
            del self.running[event.index]
        self.draw(finished, [self.line(index) for index in self.running])
        time.sleep(PAUSE)
        self.slept += PAUSE

    def draw(self, finished: list[str], running: list[str]) -> None:
        """Write over the running lines of the last time; the finished ones will not be written over again."""
        up = f"\033[{self.drawn}F" if self.drawn else ""
        sys.stdout.write(up + "".join(f"\033[K{line}\n" for line in finished + running))
        sys.stdout.flush()
        self.drawn = len(running)

    def line(self, index: int) -> str:
        room = shutil.get_terminal_size().columns - 6
        text = "".join("░" if t is None else self.decode([t]) for t in self.running[index])
        return f"{index + 1:4}  " + " ".join(text.split())[:room]

    def end(self) -> None:
        print()


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
            print("  prefix: # computed  s read from shared pages  p read from private pages  . there is none\n")


def letter(event, layer: int) -> str:
    """What a step did with the prefix in one layer; `Trace.end` explains the letters."""
    if not event.prefix_tokens:
        return "."
    if layer < event.depth:
        return "s"
    return "#" if event.refresh else "p"
