"""Texts with holes: `___` is one open token, `___8` eight of them; what stands around them is given.

    ids, P, canvas = read("The capital of France is ___ and it lies on the ___.", "", tokenizer, mask_id)
    Request(ids, prefix_len=P, canvas=canvas)

What precedes the first hole is the prompt. The space in front of a hole is the hole's: tokenizers write it as
the beginning of the word behind it. Checked: tests/test_infill.py.
"""
import re

from files import BadInput

HOLE = re.compile(r"_{3,}([1-9]\d*)?")


def lead(text: str) -> str:
    """What stands in front of the first hole."""
    return HOLE.split(text)[0].removesuffix(" ")


def read(text: str, prefix: str, tokenizer, mask_id: int) -> tuple[list[int], int, list[int]]:
    """Ids of prefix + text up to the first hole, as one running text; how many of them end within the prefix;
    the canvas behind them, `mask_id` where it is open. BadInput without a hole, or with nothing in front of
    it."""
    start, *rest = HOLE.split(text)
    if not rest:
        raise BadInput(f"{text!r} has no hole; write ___ for an open token, ___8 for eight")
    if not prefix + lead(text):
        raise BadInput(f"{text!r} starts with a hole; put at least a word in front of it")
    ids, P = tokenizer.split(prefix, lead(text))
    sizes, pieces, canvas = rest[::2], rest[1::2], []
    for size, piece in zip(sizes, pieces[:-1] + [None]):
        canvas += [mask_id] * int(size or 1)
        canvas += amid(pieces[-1] if piece is None else piece.removesuffix(" "), tokenizer)
    return ids, P, canvas


def amid(text: str, tokenizer) -> list[int]:
    """Ids of `text` as it stands in the middle of another, where no tokenizer puts a space before it: behind
    a line break, which joins with next to nothing."""
    ids, n = tokenizer.split("\n", text)
    return ids[n:] if n else tokenizer.encode(text)
