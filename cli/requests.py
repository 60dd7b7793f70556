"""Chats into requests: the ids of a text, how many of them are the prefix, how long the answer may be.

    requests = to_requests(chats, engine, "checkpoints/tiny")       # checked, before anything runs

Checked: tests/test_generate.py.
"""
import os
import warnings
from pathlib import Path

from cli import infill
from cli.lines import Chat
from cli.options import refuse
from files import BadInput, read_json


def to_requests(chats: list[Chat], engine, folder: str) -> list:
    """A checked `Request` for each chat."""
    from request import Request
    requests, capped, default, most = [], [], default_length(folder), engine.model.config.max_len
    for chat in chats:
        try:
            ids, P, canvas = render(chat, engine.tokenizer, engine.model.config.mask_id)
            options = {"prefix_len": P, "canvas": canvas, **chat.options}
            if options["canvas"] is None and "gen_length" not in options:
                options["gen_length"] = min(default, max(most - len(ids), 1))
                if options["gen_length"] < default:
                    capped.append(options["gen_length"])
            requests.append(Request(ids, **options))
            engine.check(requests[-1])
        except BadInput as e:
            refuse(f"{chat.where}: {e}")
    if capped:
        warnings.warn(f"{len(capped)} of {len(chats)} answers get less than the default of {default} tokens, "
                      f"{min(capped)} at the least: prompt and answer have {most} in all; set --gen-length")
    return requests


def render(chat: Chat, tokenizer, mask_id: int) -> tuple[list[int], int | None, list[int] | None]:
    """Ids, how many of them stand before the last question, the prefix (None: nothing does), and the canvas
    of a text with holes."""
    canvas = None
    if "infill" in chat.text:
        ids, P, canvas = infill.read(chat.text["infill"], chat.text.get("prefix", ""), tokenizer, mask_id)
    else:
        ids, P = tokenizer.render(chat.text | {"raw": True} if chat.raw else chat.text)
    return ids, P if "prefix" in chat.text or len(chat.text.get("messages", ())) > 1 else None, canvas


def default_length(folder: str) -> int:
    """gen_length where nobody says one: what generation_config.json, the hub's file, calls max_new_tokens."""
    from request import Request
    path = Path(os.path.expanduser(folder)) / "generation_config.json"
    length = read_json(path).get("max_new_tokens") if path.is_file() else None
    if length is None:
        return Request.gen_length
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        refuse(f"max_new_tokens is {length!r} in {path}; it must be at least 1: mend it, or set --gen-length")
    return length
