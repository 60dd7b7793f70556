"""Small folders in the layouts of the embedded checkpoint, LLaDA, Dream and a sentencepiece model.

Every folder is made here: a BPE (or sentencepiece) model trained on the text below, with special tokens and
chat templates like the real ones. For the tests of tokenizer, vocabulary, template and folders.
"""
import json

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tokenizer import Tokenizer
from hub.vocabulary import QWEN2_SPLIT

TEXT = """Dana Reed sits in room 42 in Lisbon and reports to Omar Haddad. Omar Haddad sits in room 17 in Oslo.
Who sits in room 42? Dana is in room 42. How many people report to Omar? Three people report to Omar Haddad.
The manager of Dana's manager is in Zürich; she's there on Tuesdays, and they'll meet on the 3rd of May 2026.
Please answer in one short sentence. You are a helpful assistant. system user assistant <html> [note]
naïve café. 東京 is far away, 日本語も少し。 No one knows which room is free. It isn't ours; we've asked.
def add(a, b):\n    return a + b  # the sum\n\n\n""".split("\n")

TINY = ["<|mask|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TINY_CHAT = ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
LLADA = ["<|startoftext|>", "<|endoftext|>", "[CLS]", "[gMASK]", "<|reserved_token_0|>", "<role>", "</role>",
         "<|mdm_mask|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLADA_CHAT = ("{% set loop_messages = messages %}{% for message in loop_messages %}"
              "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
              "message['content'] | trim + '<|eot_id|>' %}"
              "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
              "{{ content }}{% endfor %}{% if add_generation_prompt %}"
              "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
DREAM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|beginoftext|>",
         "<|mask|>"]
TOOL_CALLS = ("<tool_call>", "</tool_call>")            # added, but not special
DREAM_CHAT = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tool_call>' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
PLAIN = ["", " ", "a", "Dana is in room 42.", "  two  spaces and\ttabs \n\n\nlines\r\n end ", "naïve café",
         "e\u0301 a\u0323\u0307 q\u0307", "東京と日本語、한국어 ไทย العربية", "😀 👩‍👩‍👧‍👦 🇵🇹 ☃️!?", "it's we've I'LL",
         "\u200b\u00ad\ufeff\x00\x7f", "x" * 300, "\ue000\ue001\uf8ff", "a<|b|>c [x] <html></html> 1234567"]


def write(folder, **files):
    """A folder with these files; a name's last _ is its dot; what is not text is written as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / ".".join(name.rsplit("_", 1))
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def bpe(words, *, space=False, qwen=False, post=None):
    """A trained byte-level BPE whose special tokens stand behind its vocabulary, as in LLaDA and Dream."""
    core = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=not qwen, trim_offsets=not qwen)
    core.pre_tokenizer, core.decoder = level, decoders.ByteLevel()
    if qwen:
        core.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    core.train_from_iterator(TEXT * 3, trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    if words:
        core.add_tokens([AddedToken(w, special=w not in TOOL_CALLS, normalized=False) for w in words])
    if post:
        core.post_processor = post
    return core


def decoder_table(core, words):
    """added_tokens_decoder as tokenizer_config.json has it."""
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False)
    return {str(core.token_to_id(w)): dict(content=w, special=w not in TOOL_CALLS, **flags) for w in words}


def tiny(folder, space=True):
    core = bpe(TINY, space=space, post=processors.ByteLevel(trim_offsets=True))
    return write(folder, tokenizer_json=json.loads(core.to_str()), tokenizer_config_json=dict(
        chat_template=TINY_CHAT, eos_token="<|endoftext|>", mask_token="<|mask|>", bos_token=None))


def llada(folder):
    core = bpe(LLADA)
    return write(folder, tokenizer_json=json.loads(core.to_str()), tokenizer_config_json=dict(
        added_tokens_decoder=decoder_table(core, LLADA), add_bos_token=False, bos_token="<|startoftext|>",
        cls_token="[CLS]", eos_token="<|endoftext|>", pad_token="<|endoftext|>", chat_template=LLADA_CHAT),
        special_tokens_map_json=dict(bos_token=dict(content="<|startoftext|>"), eos_token="<|endoftext|>"),
        config_json=dict(mask_token_id=core.token_to_id("<|mdm_mask|>"),
                         eos_token_id=core.token_to_id("<|endoftext|>")))


def dream(folder, whole=False):
    """vocab.json + merges.txt + configs; or (whole) the tokenizer.json that says the same."""
    core = bpe(DREAM, qwen=True)
    data = json.loads(core.to_str())
    files = dict(tokenizer_json=data)
    if not whole:
        merges = [" ".join(m) if isinstance(m, list) else m for m in data["model"]["merges"]]
        files = dict(vocab_json={k: v for k, v in data["model"]["vocab"].items() if k not in DREAM},
                     merges_txt="#version: 0.2\n" + "\n".join(merges) + "\n",
                     added_tokens_json={w: core.token_to_id(w) for w in DREAM})
    return write(folder, **files, tokenizer_config_json=dict(
        added_tokens_decoder=decoder_table(core, DREAM), bos_token="<|beginoftext|>",
        eos_token="<|endoftext|>", mask_token="<|mask|>", pad_token="<|endoftext|>", chat_template=DREAM_CHAT,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"]),
        special_tokens_map_json=dict(mask_token=dict(content="<|mask|>", lstrip=False)))


def pieces(folder, fallback=True):
    """A sentencepiece folder: `mask` and role tokens as user-defined pieces (found in any text), <|end|> as
    control."""
    from sentencepiece import SentencePieceTrainer
    folder.mkdir(parents=True, exist_ok=True)
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 3), model_prefix=str(folder / "tokenizer"), model_type="bpe",
        vocab_size=500, byte_fallback=fallback,
        user_defined_symbols=["<|mask|>", "<|user|>", "<|assistant|>", "<|system|>"],
        control_symbols=["<|end|>"], minloglevel=2, num_threads=1)
    return write(folder, tokenizer_config_json=dict(
        eos_token="</s>", bos_token="<s>", mask_token="<|mask|>", chat_template=TINY_CHAT))


MAKERS = {"tiny": tiny, "llada": llada, "dream": dream, "pieces": pieces}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return {name: make(root / name) for name, make in MAKERS.items()}


@pytest.fixture(params=MAKERS)
def tok(request, folders):
    return Tokenizer.from_folder(folders[request.param])


@pytest.fixture(params=["tiny", "tiny without space", "llada", "dream whole"])
def both(request, tmp_path):
    """(ours, the library's own object on the same tokenizer.json)."""
    make = {"tiny": tiny, "tiny without space": lambda f: tiny(f, space=False), "llada": llada,
            "dream whole": lambda f: dream(f, whole=True)}
    folder = make[request.param](tmp_path)
    return Tokenizer.from_folder(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


DOC = "Dana Reed sits in room 42 in Lisbon.\nOmar Haddad sits in room 17 in Oslo."
TURNS = [{"role": "system", "content": DOC}, {"role": "user", "content": "Where is Omar?"},
         {"role": "assistant", "content": "In room 17."}]


def ask(question, before=TURNS):
    return [*before, {"role": "user", "content": question}]


def rendering(tok, messages):
    """The template's text, straight from jinja, with nothing of ours in between."""
    return tok.template.program.render(messages=messages, add_generation_prompt=True, **tok.template.values)


def flat(text):
    """Without spaces and in NFKC, as sentencepiece may fold them."""
    return "".join(normalizers.NFKC().normalize_str(text).split())
