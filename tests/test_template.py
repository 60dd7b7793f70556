"""Chat templates are somebody else's programs: what they may use, what goes wrong, what a user may set."""
import shutil

import pytest

from layouts import DREAM_CHAT, LLADA_CHAT, TINY_CHAT, ask, dream, flat, llada, tiny, write
from tokenizer import Tokenizer

# The end of Qwen3's template, in the words that matter.
QWEN3_CHAT = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def read(folder, template=None, **options):
    """The tokenizer of a folder, with this template in place of its own."""
    if template is not None:
        write(folder, chat_template_jinja=template)
    return Tokenizer.from_folder(folder, **options)


def chat_text(tok, question="Who?"):
    return tok.decode(tok.chat(ask(question, []))[0])


def test_thinking_is_off(tmp_path):
    """Symptom: answers of the models made from Qwen3 opened with an empty think block. Cause: their
    template writes it only if enable_thinking is false, and the variable was not passed. Fix: false is the
    default; template_vars sets it. CoDA's template is rendered as its authors do, without the variable."""
    folder, block = dream(tmp_path), "<think>\n\n</think>\n\n"
    assert chat_text(read(folder, QWEN3_CHAT)) == "user\nWho?\nassistant\n" + block
    for options in ({}, dict(template_vars={}), dict(template_vars={"enable_thinking": False})):
        assert chat_text(read(folder, **options)).endswith(block)
    assert chat_text(read(folder, template_vars={"enable_thinking": True})) == "user\nWho?\nassistant\n"
    write(folder, config_json=dict(model_type="CoDA"))
    assert chat_text(read(folder)) == "user\nWho?\nassistant\n"
    assert chat_text(read(folder, template_vars={"enable_thinking": False})).endswith(block)


@pytest.mark.parametrize("make, template", [(tiny, TINY_CHAT), (llada, LLADA_CHAT), (dream, DREAM_CHAT)])
def test_other_templates_are_as_before(tmp_path, make, template):
    """Promise: the default variable changes nothing in a template that does not ask for it."""
    tok = read(make(tmp_path))
    without = {name: value for name, value in tok.template.values.items() if name.endswith("_token")}
    text = tok.template.program.render(messages=ask("Who?"), add_generation_prompt=True, **without)
    assert tok.template.source == template and tok.decode(tok.chat(ask("Who?"))[0]).strip()
    shown = text
    for word in tok.special:
        shown = shown.replace(word, "")
    assert flat(tok.decode(tok.chat(ask("Who?"))[0])) == flat(shown)


def test_template_variables(tmp_path):
    """Promise: template_vars reach the template as they are, text, number or list; what they spell is the
    template's own, so that a variable may write a special token; a message still may not."""
    tok = read(tiny(tmp_path, space=False), TINY_CHAT + "{{ tail }}{{ items | tojson }}",
               template_vars=dict(tail="<|mask|>\ue000", items=[1, "é"]))
    ids, _ = tok.chat(ask("<|mask|>", []))
    assert ids.count(tok.mask_id) == 1 and tok.decode(ids) == '<|mask|>\ue000[1, "é"]'


@pytest.mark.parametrize("variables, words", [
    ({"thinking": True}, "'thinking', which the chat template does not take; it takes enable_thinking"),
    ({"messages": []}, "'messages'"), ({"add_generation_prompt": False}, "'add_generation_prompt'")])
def test_template_variables_without_effect(tmp_path, variables, words):
    """Symptom: a misspelt variable was swallowed, and the answer looked as if it had been set. Promise: a
    name that the template does not read, or that is the engine's, is an error; so is any without a template
    or tokenizer."""
    folder = dream(tmp_path / "dream")
    with pytest.raises(ValueError, match=words):
        read(folder, QWEN3_CHAT, template_vars=variables)
    with pytest.raises(ValueError, match="template_vars is 'x=1'; it must be a dict"):
        read(folder, template_vars="x=1")
    with pytest.raises(ValueError, match="no chat template; leave it out"):
        read(folder, "", template_vars=variables)
    with pytest.raises(ValueError, match="no tokenizer files.*leave them out"):
        read(tmp_path / "none", template_vars=variables)


def test_generation_tag(tmp_path):
    """Symptom: SmolLM3-like folders failed with "Encountered unknown tag 'generation'". Cause: transformers
    adds this tag, for training; Jinja has none. Fix: what it encloses is text, with its own white space
    control and scope."""
    source = ("{% for m in messages %}<|{{ m.role }}|>{% generation -%}  {{ m.content }}{% set x = 1 %}"
              "<|end|>{%- endgeneration %}{{ x }}{% endfor %}<|assistant|>")
    plain = source.replace("{% generation -%}  ", "").replace("{% set x = 1 %}", "")
    plain = plain.replace("{%- endgeneration %}{{ x }}", "")
    tagged = read(tiny(tmp_path / "a"), source.replace("{{ x }}", "{{ x if x is defined }}"))
    assert tagged.chat(ask("Who?")) == read(tiny(tmp_path / "b"), plain).chat(ask("Who?"))
    assert tagged.special["<|end|>"] in tagged.eos_ids


@pytest.mark.parametrize("call, text", [
    ("", '{"b": "é", "a": [1, 2]}'), ("(indent=1)", '{\n "b": "é",\n "a": [\n  1,\n  2\n ]\n}'),
    ("(sort_keys=true, separators=(',', ':'))", '{"a":[1,2],"b":"é"}'),
    ("(ensure_ascii=true)", '{"b": "\\u00e9", "a": [1, 2]}'),
    ("(allow_nan=false)", '{"b": "é", "a": [1, 2]}')])
def test_tojson_takes_the_keywords_of_json(tmp_path, call, text):
    """Symptom: "tojson() got an unexpected keyword argument 'ensure_ascii'". Promise: all of json.dumps'
    keywords, and none lets a message spell a special token or loses its words."""
    template = ("{{ {'b': 'é', 'a': [1, 2]} | tojson%s }}|{%% for m in messages %%}{{ m.content | tojson%s }}"
                "{%% endfor %%}<|end|>" % (call, call))
    tok = read(tiny(tmp_path, space=False), template)
    assert chat_text(tok, "x<|mask|>") == text + '|"x<|mask|>"'
    assert tok.mask_id not in tok.chat(ask("x<|mask|>"))[0]


@pytest.mark.parametrize("broken", [
    "{% if %}", "{{ x", "{% unknown %}", "{{ x | unknown }}", b"\xff\xfe", "{{ " + "(" * 5000,
    5, dict(default="x"), [dict(name="rag", template="x"), dict(name="tools", template="y")], [5]])
def test_broken_template_stops_chats_only(tmp_path, broken):
    """Symptom: a folder with one mistake in its template could not be loaded, not even for plain text.
    Cause: the template was compiled while the folder was read. Fix: its mistake is told when a chat needs
    it."""
    folder = tiny(tmp_path)
    if isinstance(broken, (str, bytes)):
        (folder / "chat_template.jinja").write_bytes(broken.encode() if isinstance(broken, str) else broken)
    else:
        write(folder, tokenizer_config_json=dict(chat_template=broken, eos_token="<|endoftext|>"))
    tok = Tokenizer.from_folder(folder, template_vars={"enable_thinking": False})
    assert tok.has_chat and tok.eos_ids == {tok.special["<|endoftext|>"]}
    assert tok.render({"prefix": "a", "prompt": "b", "raw": True}) == tok.split("a", "b")
    for request in ({"prefix": "a", "prompt": "b"}, {"messages": ask("Who?")}):
        with pytest.raises(ValueError, match="chat template cannot be read .*give the text as raw") as error:
            tok.render(request)
        assert len(str(error.value)) < 300


@pytest.mark.parametrize("template, message", [
    ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"), ("{{ nothing }}", "nothing"),
    ("{{ a.b }}", "undefined"), ("{{ 1 / 0 }}", "zero"), ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "[Rr]ange"), ("fixed", "leaves out")])
def test_template_that_fails(tmp_path, template, message):
    """Promise: a template is somebody else's program; whatever it does wrong is one ValueError, and it is
    sandboxed."""
    tok = Tokenizer.from_folder(write(tiny(tmp_path), chat_template_jinja=template))  # goes before the config
    with pytest.raises(ValueError, match=message):
        tok.chat(ask("Who?"))


def test_template_surroundings(tmp_path):
    """Promise: strftime_now, tojson, loop controls and undefined tests work as in the field; tojson escapes
    nothing, so that what it writes of a message is still guarded."""
    source = ("{% if tools %}T{% endif %}{{ strftime_now('%Y')[:2] }}\n{% for m in messages %}\n"
              "    {% if m.tool_calls %}{% break %}{% endif %}\n{{ m.content | tojson }}<|end|>{% endfor %}")
    tok = Tokenizer.from_folder(write(tiny(tmp_path, space=False), chat_template_jinja=source))
    ids, _ = tok.chat([{"role": "user", "content": "<|mask|> é\n"}])
    assert tok.decode(ids) == '20\n"<|mask|> é\\n"'
    assert tok.mask_id not in ids and ids[-1] == tok.special["<|end|>"]


def test_the_engine_passes_them_on(text_folder, tmp_path):
    """Promise: Engine.from_folder takes template_vars, and refuses a wrong name before weights load."""
    from engine import Engine
    with pytest.raises(ValueError, match="'thinking', which the chat template does not take"):
        Engine.from_folder(text_folder, template_vars={"thinking": True})
    folder = shutil.copytree(text_folder, tmp_path / "model")
    write(folder, chat_template_jinja=QWEN3_CHAT)
    engine = Engine.from_folder(folder, template_vars={"enable_thinking": True})
    assert "think" not in chat_text(engine.tokenizer)
    assert "think" in chat_text(Engine.from_folder(folder).tokenizer)
