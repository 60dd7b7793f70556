"""Small random models that every test file shares, and the paths they need. Everything runs on the CPU in
float32."""
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from model import Config, Transformer       # noqa: E402

torch.set_num_threads(1)        # small models: a second thread costs more than it brings
GOLDEN = ROOT / "tests" / "golden"


def tiny(shift=False, layers=4, seed=0, vocab=96, scale=3.0, **kw) -> Transformer:
    """A random model whose answers hang on every token: weights wide enough that the arg-max is decided by
    a margin."""
    torch.manual_seed(seed)
    settings = dict(layers=layers, hidden=48, heads=4, kv_heads=2 if shift else 4, mlp=64, vocab=vocab,
                    max_len=512, theta=1e4, eps=1e-6, mask_id=vocab - 1, eos_ids=(vocab - 2,), qkv_bias=shift,
                    tied=False, shift=shift) | kw
    model = Transformer(Config(**settings))
    for name, p in model.named_parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=scale * (1.0 if name.startswith("embed") else p.shape[1] ** -0.5))
        elif name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.3)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def llada():
    return tiny()


@pytest.fixture(scope="session")
def dream():
    return tiny(shift=True)


@pytest.fixture(params=["llada", "dream"])
def model(request):
    return request.getfixturevalue(request.param)


def prompt(n: int, seed: int = 0, vocab: int = 90) -> list[int]:
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|> {{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
SPECIAL = ["<|mask|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def save_folder(folder, model, tokenizer=None):
    """Write a model as a LLaDA folder; `tokenizer` is a tokenizers.Tokenizer whose specials are SPECIAL."""
    import json

    from safetensors.torch import save_file

    from hub.checkpoint import checkpoint_names, fingerprint
    from hub.families import FAMILIES
    c, folder = model.config, Path(folder)
    folder.mkdir(exist_ok=True)
    family = FAMILIES["llada"]
    raw = {theirs: getattr(c, ours) for ours, theirs in family.keys.items()}
    config = {"model_type": "llada", "architectures": ["LLaDAModelLM"], **raw}
    (folder / "config.json").write_text(json.dumps(config))
    state = model.state_dict()
    save_file({theirs: state[ours].contiguous() for ours, theirs in checkpoint_names(model, family).items()},
              folder / "model.safetensors")
    if tokenizer:
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(
            {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}))
    (folder / "depth.json").write_text(json.dumps(
        {"version": 1, "fingerprint": fingerprint(folder), "layers": c.layers,
         "table": {"20": c.layers // 2}}))
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """A LLaDA folder with random weights, a byte-level BPE and a chat template: it answers nonsense, but
    always the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    text = (ROOT / "tests" / "golden" / "README.md").read_text()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    model = tiny(vocab=tokenizer.get_vocab_size(), mask_id=0, eos_ids=(1,))
    return save_folder(tmp_path_factory.mktemp("model"), model, tokenizer)
