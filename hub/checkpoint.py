"""Model folders: weights in safetensors files, as they come from the hub, read without `transformers`.

    model = load("checkpoints/tiny", device="cpu", dtype="auto")        # -> model.Transformer

One file or shards. Every tensor name and shape is checked against the family's (families.py); what is
missing, left over or misshapen stands in one ValueError. Checked on the published shapes
(tests/test_shapes.py), on small folders (test_loading.py) and against transformers (test_reference.py).
"""
import hashlib
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from files import BadInput, memory
from hub.families import FAMILIES, Family, hub_name, read_config, read_json
from model import Transformer


FOREIGN = "pytorch_model*.bin", "*.gguf", "*.pt", "*.pth", "*.ckpt"         # weights that others read


def checkpoint_names(model: Transformer, family: Family) -> dict[str, str]:
    """The name that each parameter of `model` has in the family's checkpoints."""
    names = {}
    for ours in model.state_dict():
        *layer, part, kind = ours.split(".")            # layers.7.q.bias, or norm.weight
        stem = family.layers.format(layer[1]) if layer else ""
        names[ours] = f"{stem}{family.names[part]}.{kind}"
    return names


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those its index names, else the single one."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise BadInput(f"{index} is no index of shards ({e!r}); download it again") from e
    absent = [f.name for f in files if not f.is_file()]
    foreign = sorted(f.name for pattern in FOREIGN for f in folder.glob(pattern))
    if absent and foreign:
        raise BadInput(f"{folder} has its weights in {foreign[0]}, and safetensors are read; get "
                       "model.safetensors or its shards, or save the weights so")
    if absent:
        raise BadInput(f"{folder} lacks {', '.join(absent)}; download the folder again")
    return files


def _open(path: Path):
    """A safetensors file, mapped: its tensors are views, read when they are touched."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise BadInput(f"{path} cannot be read ({e}); download it again") from e


def resolve(folder, device: str, dtype) -> tuple[torch.device, torch.dtype]:
    """What "auto" stands for: the GPU if there is one; the dtype the weights are stored in, but float32 for
    bfloat16 weights on a processor that is slow at it. Names become torch objects."""
    names = "float32", "bfloat16", "float16"
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else str(device)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise BadInput(f"device is {device}; it must be auto, cpu, cuda or cuda:N")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device is {device} and torch finds no GPU here; use cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise BadInput(f"device is {device} and the last of {count} is cuda:{count - 1}; use that or another")
    if dtype not in ("auto", *names, *(getattr(torch, name) for name in names)):
        raise BadInput(f"dtype is {dtype}; it must be auto, {', '.join(names)}")
    if dtype == "auto":
        with _open(_shards(Path(folder))[0]) as f:
            stored = next((f.get_slice(key).get_dtype() for key in f.keys()), None)
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored, torch.float32)
        if device.type == "cpu" and not (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()):
            dtype = torch.float32
    return device, getattr(torch, dtype) if isinstance(dtype, str) else dtype


def load(folder, device="cpu", dtype="float32", mask_id: int | None = None,
         shift: bool | None = None) -> Transformer:
    """Read a model folder: config.json and model.safetensors, or shards with model.safetensors.index.json.

    mask_id, shift: as in `read_config`. A stored output head is used, tied or not; a tied model may lack it.

    The model is built without storage, and each tensor is read, cast and moved by itself, so that the weights
    are never in memory twice; those that need no cast stay mapped and are read when first used. A bar on a
    terminal, if it takes longer than a second. Raises ValueError naming every missing, left-over and
    mis-shaped tensor in one message.
    """
    folder = Path(folder)
    config = read_config(folder, mask_id, shift)
    device, dtype = resolve(folder, device, dtype)
    family = FAMILIES[read_json(folder / "config.json")["model_type"]]
    stored = _find_tensors(folder)
    head, embed = (f"{family.names[part]}.weight" for part in ("head", "embed"))
    if config.tied and head in stored:
        if _equal(stored, head, embed):
            del stored[head]
        else:
            warnings.warn(f"by its config.json the output head of {folder} is the embedding, but the files "
                          f"hold another, {head}: that one is used", stacklevel=2)
            config = replace(config, tied=False)
    with torch.device("meta"):
        model = Transformer(config)
    need = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    if device.type == "cpu" and need > memory():
        raise BadInput(f"the weights of {folder} take {need / 1e9:.1f} GB as {str(dtype)[6:]} and this "
                       f"machine has {memory() / 1e9:.1f}; use dtype bfloat16, a GPU or a smaller model")
    state = _read_tensors(folder, stored, model, family, device, dtype)
    if config.tied:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    if config.tied:
        model.head.weight = model.embed.weight
    return model.eval().requires_grad_(False)


def _find_tensors(folder: Path) -> dict[str, Path]:
    """The tensors of a folder: name -> the file that holds it."""
    found = {}
    for path in _shards(folder):
        with _open(path) as f:
            found.update(dict.fromkeys(f.keys(), path))
    return found


def _equal(stored: dict, a: str, b: str) -> bool:
    """Whether two tensors of a folder are the same to the bit. What is read is not kept."""
    if b not in stored:
        return False
    with _open(stored[a]) as one, _open(stored[b]) as other:
        x, y = one.get_tensor(a), other.get_tensor(b)
        return x.dtype == y.dtype and torch.equal(x, y)


def _read_tensors(folder: Path, stored: dict, model: Transformer, family: Family, device, dtype) -> dict:
    """The state of `model` from the `stored` tensors; ValueError unless they are those that it wants."""
    names = checkpoint_names(model, family)
    if model.config.tied:
        del names["head.weight"]
    ours = {theirs: name for name, theirs in names.items()}
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    lacking = [theirs for theirs in ours if theirs not in stored]
    buffer = "rotary_emb.inv_freq"                      # some exports carry it along
    left = [key for key in stored if key not in ours and not key.endswith(buffer)]
    state, wrong = {}, []
    files = sorted(set(stored.values()))
    # disable=None: no bar where stderr is no terminal
    bar = tqdm(total=sum(path.stat().st_size for path in files), desc=f"loading {hub_name(folder)}", unit="B",
               unit_scale=True, leave=False, delay=1, disable=None)
    for path in files:
        with _open(path) as f:
            for key in (key for key, where in stored.items() if where == path and key in ours):
                shape = tuple(f.get_slice(key).get_shape())
                if shape != shapes[ours[key]]:
                    wrong.append(f"{key} is {shape}, not {shapes[ours[key]]}")
                    continue
                state[ours[key]] = mapped = f.get_tensor(key)
                if mapped.dtype != dtype or device.type != "cpu":
                    with _open(path) as own:            # its mapping ends here, and with it the pages read
                        state[ours[key]] = own.get_tensor(key).to(device, dtype)
                bar.update(mapped.nbytes)
    bar.close()
    faults = [f"{what}: {_some(keys)}" for what, keys in
              (("missing", lacking), ("left over", left), ("wrong shape", wrong)) if keys]
    if faults:
        if prefix := _foreign_prefix(lacking, left):
            faults.append(f"each name has {prefix!r} before it, which nobody reads; save them without")
        raise BadInput(f"the tensors of {folder} do not fit its config.json; " + "; ".join(faults))
    return state


def _some(names: list, most: int = 4) -> str:
    """All of a few names; of many, which make no sentence, some and the count."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])}, ... ({len(names)} in all)"


def _foreign_prefix(lacking: list, left: list) -> str:
    """What stands before every name of a checkpoint saved from inside a wrapper, as "module."; or nothing."""
    found = {key.removesuffix(lacking[0]) for key in left if lacking and key.endswith(lacking[0])}
    return next((prefix for prefix in found if {prefix + name for name in lacking} <= set(left)), "")


def fingerprint(folder) -> str:
    """A short name for a model folder: a hash over config.json and 64 samples of 4 kB of each weight file."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for path in _shards(Path(folder)):
        size = path.stat().st_size
        with open(path, "rb") as f:
            for i in range(64):
                f.seek(max(size - 4096, 0) * i // 63)
                digest.update(f.read(4096))
    return digest.hexdigest()[:16]
