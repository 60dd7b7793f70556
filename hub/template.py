"""The chat template of a model folder: messages -> text in which every special token is the template's own.

    template = Template(folder, source, named)          # source: what tokenizer_config.json has, if anything
    text = template.render(messages, datetime.now())    # up to where the model's answer begins

A template is a Jinja program out of somebody else's hands: it runs in a sandbox, in the surroundings that
transformers gives it, and whatever it does wrong is one ValueError. Checked in tests/test_tokenizer.py on the
templates of LLaDA, Dream and the embedded checkpoint.
"""
import json
from contextlib import suppress
from datetime import datetime

import jinja2.sandbox


class Undefined(jinja2.Undefined):
    """`{% if tools %}` is fair, writing it is not."""
    __str__ = jinja2.Undefined._fail_with_undefined_error


class Template:
    """The chat template of a folder; `source` is empty if it has none. named: bos_token and the like."""
    ANSWER = "answer"           # what everybody says in the sample chat

    def __init__(self, folder, source, named):
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text("utf-8")
        if isinstance(source, list):
            source = next((t["template"] for t in source if t["name"] == "default" or len(source) == 1), None)
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, undefined=Undefined, extensions=["jinja2.ext.loopcontrols"])
        env.globals["raise_exception"], env.filters["tojson"] = raise_exception, tojson
        self.source, self.named = source or "", named
        self.program = env.from_string(self.source)

    def render(self, messages, now: datetime, answer=True):
        """The text of a chat; with `answer`, up to where the model's answer begins."""
        try:
            return self.program.render(messages=messages, add_generation_prompt=answer, tools=None,
                                       documents=None, strftime_now=now.strftime, **self.named)
        except Exception as error:
            raise ValueError(f"The chat template fails: {error or type(error).__name__}.") from error

    def sample(self):
        """A chat up to the end of an answer, with all the markup that the template writes."""
        sample = ""
        for roles in (("user", "assistant"), ("system", "user", "assistant")):  # some refuse a system message
            chat = [{"role": role, "content": self.ANSWER} for role in roles]
            with suppress(ValueError):
                sample = self.render(chat, datetime.now(), answer=False)
        return sample


def raise_exception(message):
    raise jinja2.TemplateError(message)


def tojson(value, indent=None):
    """Jinja's own would escape the stand-ins."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


class StandIns:
    """Characters that stand in a message for the first one of each special token spelled there.

    A template is given messages with stand-ins, so that every special token in its text is its own. They are
    one character for one, and in none of `texts`.
    """

    def __init__(self, special, *texts):
        used = set().union(*special, *texts)
        free = (c for c in map(chr, range(0xE000, 0x110000)) if c not in used)   # private use and beyond
        self.spellings = tuple(special)
        self.stand_in = {spelling[0]: next(free) for spelling in special}
        self.back = {ord(there): first for first, there in self.stand_in.items()}
        self.unused = next(free)

    def put(self, text):
        spelled = lambda at, letter: letter in self.stand_in and text.startswith(self.spellings, at)
        return "".join(self.stand_in[c] if spelled(at, c) else c for at, c in enumerate(text))

    def take_back(self, text):
        return text.translate(self.back)
