"""The chat template of a model folder: messages -> text in which every special token is the template's own.

    template = Template(folder, source, {"bos_token": "<s>"})  # source: tokenizer_config.json's chat_template
    text = template.render(messages, datetime.now())           # up to where the model's answer begins

A template is a Jinja program by somebody else: it runs in a sandbox, in the surroundings that transformers
gives it, and whatever it does wrong is a ValueError when a chat is rendered, never when the folder is read.
Checked in tests/test_template.py on templates like those of LLaDA, Dream, Qwen3 and the embedded checkpoint.
"""
import json
from contextlib import suppress
from datetime import datetime

import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from files import BadInput

OURS = {"messages", "add_generation_prompt", "strftime_now", "raise_exception"}      # not for template_vars


class Template:
    """The chat template of a folder. exists: it has one. source: its text.

    values: what it may write beside the messages: bos_token and the like, template_vars.
    """
    ANSWER = "answer"           # what everybody says in the sample chat

    def __init__(self, folder, source, values):
        self.source, self.values, self.broken = "", values, None
        try:
            self.source = read_source(folder, source)
            self.program = surroundings().from_string(self.source)
        except Exception as error:              # whatever Jinja, or Python behind it, makes of a foreign text
            self.broken = f"{error or type(error).__name__}"
        self.exists = bool(self.source or self.broken)

    def render(self, messages, now: datetime, answer=True):
        """The text of a chat; with `answer`, up to where the model's answer begins."""
        if self.broken:
            raise BadInput(f"The chat template cannot be read ({self.broken}); give the text as raw.")
        try:
            values = {"tools": None, "documents": None, **self.values}
            return self.program.render(values, messages=messages, add_generation_prompt=answer,
                                       strftime_now=now.strftime)
        except Exception as error:
            raise BadInput(f"The chat template fails: {error or type(error).__name__}.") from error

    def sample(self):
        """A chat up to the end of an answer, with all the markup that the template writes."""
        sample = ""
        for roles in (("user", "assistant"), ("system", "user", "assistant")):  # some refuse a system message
            chat = [{"role": role, "content": self.ANSWER} for role in roles]
            with suppress(ValueError):
                sample = self.render(chat, datetime.now(), answer=False)
        return sample

    def check(self, names):
        """ValueError for a name among template_vars that the template does not read."""
        if names and not self.exists:
            raise BadInput(f"template_vars has {min(names)!r}, but there is no chat template; leave it out")
        if self.broken:
            return
        known = jinja2.meta.find_undeclared_variables(surroundings().parse(self.source)) - OURS
        if unknown := set(names) - known:
            raise BadInput(f"template_vars has {min(unknown)!r}, which the chat template does not take; "
                           f"it takes {', '.join(sorted(known)) or 'none'}")


def read_source(folder, source):
    """The text of the template: a file's, or the config's; of several the one named default, or the only."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8-sig")
    if isinstance(source, list) and source:
        named = {entry["name"]: entry["template"] for entry in source}
        name = next(iter(named)) if len(named) == 1 else "default"
        if name not in named:
            raise BadInput(f"of the templates {', '.join(named)} none is named default")
        source = named[name]
    if source and not isinstance(source, str):
        raise BadInput(f"it is {source!r}, not a text")
    return source or ""


# -- what transformers gives a template ---------------------------------------------------------------------

def surroundings():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=Undefined,
        extensions=[Generation, "jinja2.ext.loopcontrols"])
    env.globals["raise_exception"], env.filters["tojson"] = raise_exception, tojson
    return env


class Undefined(jinja2.Undefined):
    """`{% if tools %}` is fair, writing it is not."""
    __str__ = jinja2.Undefined._fail_with_undefined_error


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what a model is trained to write: here, mere text."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def raise_exception(message):
    raise jinja2.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False, **keywords):
    """json.dumps. Jinja's own would escape < and >; an escaped stand-in could not be taken back."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys,
                      **keywords)
    if ensure_ascii:
        return "".join(c if c.isascii() or is_private(c) else json.dumps(c)[1:-1] for c in text)
    return text


# -- special tokens spelled in a message --------------------------------------------------------------------

def is_private(letter):
    """Unicode's private use areas: no text needs them, so stand-ins are taken from there."""
    return "\ue000" <= letter <= "\uf8ff" or letter >= "\U000f0000"


class StandIns:
    """Characters that stand in a message for the first one of each special token spelled there.

    A template is given messages with stand-ins, so that every special token in its text is its own. They are
    one character for one, and in none of `texts`.
    """

    def __init__(self, special, *texts):
        used = set().union(*special, *texts)
        free = (c for c in map(chr, range(0xE000, 0x110000)) if is_private(c) and c not in used)
        self.spellings = tuple(special)
        self.stand_in = {spelling[0]: next(free) for spelling in special}
        self.back = {ord(there): first for first, there in self.stand_in.items()}
        self.unused = next(free)

    def put(self, text):
        spelled = lambda at, letter: letter in self.stand_in and text.startswith(self.spellings, at)
        return "".join(self.stand_in[c] if spelled(at, c) else c for at, c in enumerate(text))

    def take_back(self, text):
        return text.translate(self.back)
