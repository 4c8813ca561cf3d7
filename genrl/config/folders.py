"""Model folders on disk, as far as a configuration is checked against them: names, JSON files, and whether weight files
and tokenizers are whole, by their names and headers. No weights, no torch.

`genrl check` and the loaders ask the same function, so both refuse a folder that cannot load for the same reason. Of a
model that is not on this machine, names and shapes are packed into the package, or read from the hub: the JSON files
whole, and of weight files the headers alone, some hundred kB.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Either has a transformers model that sees or hears."""


def looks_local(path: str) -> bool:
    """Whether `path` is written like a folder rather than a hub id (org/name)."""
    return path.startswith((".", "/", "~", "assets/")) or path.count("/") != 1


def is_hub_id(path: str) -> bool:
    """Whether `path` is org/name, and nothing lies here that could be meant: neither it, nor a folder like `org`."""
    return not looks_local(path) and not Path(path).exists() and not Path(path.partition("/")[0]).is_dir()


def hub_file(source: str) -> tuple[str, str | None]:
    """(hub id, file) of an adapter on the hub, which may be written org/name:file.safetensors."""
    name, _, file = source.partition(":")
    return name, file or None


def is_single_file(path: str) -> bool:
    """Whether `path` is written like a checkpoint in one file."""
    return path.endswith(".safetensors") or is_gguf(path)


def is_gguf(path: str) -> bool:
    """Whether `path` is written like a denoiser in llama.cpp's format, quantised."""
    return path.endswith(".gguf")


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object of a model folder; empty where there is no such file or it is broken."""
    if not path.is_file() or path.stat().st_size > 10_000_000:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def nearest_beside(path: Path, fits: Callable[[Path], bool] = Path.exists) -> str:
    """What may have been meant by a name that does not exist, as the end of a message: the most like it that fits."""
    names = [entry.name for entry in path.parent.iterdir() if fits(entry)] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def nearest_folder(path: Path) -> str:
    """As `nearest_beside`, of folders; where there is none like it, how a hub id is written."""
    return nearest_beside(path, Path.is_dir) or "; a hub id is written org/name"


def no_transformers_model(key: str, given: str, notes: list[str]) -> str | None:
    """What is wrong with the value of a key that names a saved transformers model; None for a folder of one, and for a
    hub id, of which `notes` is told."""
    path = Path(given).expanduser()
    if not path.is_dir():
        if looks_local(given):
            return f"no such folder: {path}{nearest_folder(path)}"
        notes.append(f"{key}: {given} is loaded from the hub when training starts")
    elif "model_type" not in read_json(path / "config.json"):
        return f"{path} has no config.json with a model_type, so it is no saved transformers model"
    return None


def near(path: Path) -> str:
    """A hint at the end of an error: folders of a similar name, or else the runs beside it."""
    around = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, [name for name in around if name != path.name], n=3, cutoff=0.5)
    paths = [str(path.parent / name) for name in close]
    return f"; did you mean {' or '.join(paths)}?" if paths else runs_in(path.parent)


def runs_in(folder: Path) -> str:
    """The runs of a folder, as the end of a message."""
    runs = sorted(str(file.parent) for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.yaml"))
    return f"; runs in {folder}: {', '.join(runs[:5])}" if runs else ""


DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
               "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SCALES = re.compile(r"scaled_fp8$|\.(scale_weight|weight_scale|scale_input|input_scale)(_2)?$")
UNSCALED = "take the file in bf16 or fp16, or a .gguf"
POINTER = b"version https://git-lfs"
STEMS = ("diffusion_pytorch_model", "model")
"""How the weight files of diffusers and of transformers are called."""
VOCABULARIES = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("spiece.model",),
    ("tokenizer.model",),
    ("sentencepiece.bpe.model",),
    ("vocab.txt",),
    ("tekken.json",),
    ("source.spm",),
)
"""Files that hold a tokenizer's vocabulary; all of one entry."""


class HeaderError(ValueError):
    """A file that is not safetensors."""


def read_header(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of every tensor of a safetensors file. Reads the JSON header only, no weights."""
    for name, shape, dtype, _ in _entries(path):
        yield name, shape, dtype


def _entries(path: Path) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """Entries of a header, each with the place in the file at which its tensor ends."""
    with path.open("rb") as stream:
        start = stream.read(8)
        if POINTER.startswith(start) and start:
            raise HeaderError("is a Git LFS pointer, not the weights: run `git lfs pull` in its repository")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise HeaderError("not a safetensors file")
        raw = stream.read(length)
    if len(raw) < length:
        raise HeaderError(f"is cut: its header has {len(raw):,} of {length:,} bytes; download it again")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise HeaderError("its header is not JSON") from None
    if not isinstance(header, dict):
        raise HeaderError("its header is not a JSON object")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            shape, dtype = tuple(int(size) for size in entry["shape"]), str(entry["dtype"])
            end = 8 + length + int(entry["data_offsets"][1]) if "data_offsets" in entry else 0
        except (KeyError, TypeError, ValueError, IndexError):
            raise HeaderError(f"its entry {name[:60]!r} is not a tensor") from None
        yield name, shape, dtype, end


def file_problem(path: Path) -> str | None:
    """Why a weight file cannot be read: a pointer, cut, empty, damaged, or another format."""
    if not path.is_file():
        return "is no file: a folder, or a link whose target is gone; download it again"
    if path.stat().st_size == 0:
        return "is empty; download it again"
    if path.suffix != ".safetensors":
        with path.open("rb") as stream:
            return "is a Git LFS pointer: run `git lfs pull`" if stream.read(len(POINTER)) == POINTER else None
    try:
        entries = list(_entries(path))
    except (HeaderError, OSError) as error:
        return str(error)
    end = max((end for *_, end in entries), default=0)
    if not sum(math.prod(shape) for _, shape, _, _ in entries):
        return "holds no weights"
    if path.stat().st_size < end:
        return f"is cut: it has {path.stat().st_size:,} of {end:,} bytes; download it again"
    if any(dtype not in DTYPE_BYTES or not end for _, _, dtype, end in entries):
        return None  # of numbers of a newer format, or a header alone, nothing more is known
    with path.open("rb") as stream:
        head = 8 + int.from_bytes(stream.read(8), "little")
    promised = head + sum(math.prod(shape) * DTYPE_BYTES[dtype] for _, shape, dtype, _ in entries)
    if path.stat().st_size != promised:
        return f"is damaged: by its header it has {promised:,} bytes, found {path.stat().st_size:,}; download it again"
    return None


def scales_problem(path: Path) -> str | None:
    """Why a single file of 8 bits cannot be loaded: diffusers leaves out the scales beside its weights, without which
    they are others. A folder says by its config.json how it is quantised."""
    scales = [name for name, *_ in read_header(path) if SCALES.search(name)]
    return (
        f"has {len(scales)} scales of fp8 weights ({scales[0]}), which diffusers leaves out: {UNSCALED}"
        if scales
        else None
    )


def weight_files(folder: Path, variant: str | None, stems: Sequence[str] = STEMS) -> list[Path]:
    """The safetensors files that diffusers and transformers would load: those of the variant, else the plain ones."""
    files = sorted(folder.glob("*.safetensors"))
    of_variant = [file for file in files if variant and variant in file.name.split(".")]
    return of_variant or [file for file in files if file.name.count(".") == 1]


def weights_problem(folder: Path, variant: str | None = None, *, pickled: bool = False, key: str = "") -> str | None:
    """Why the weights of a saved network cannot be loaded from this folder, and what helps; None where they can.

    variant: of the file names, as `fp16`. pickled: whether .bin files are taken. key: of the configuration that sets
    the variant, "" where there is none.
    """
    unsharded = [file for file in weight_files(folder, variant) if "-of-" not in file.name]
    indices = [
        file
        for stem in STEMS
        for file in (folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors.index.{variant}.json")
        if file.is_file()
    ]
    for index in indices:
        if problem := _shards_problem(folder, index):
            return problem
    files = weight_files(folder, variant)
    for file in files:
        if problem := file_problem(file):
            return f"{file.name} {problem}"
    if unsharded or indices:
        return None
    if files:
        return f"has shards ({files[0].name}) but no .safetensors.index.json, which lists them"
    variants = sorted({name[1] for file in folder.glob("*.safetensors") if len(name := file.name.split(".")) == 3})
    if variants:
        hint = f"; write {key}: {variants[0]}" if key else ""
        return f"holds no plain weights, only the variant {', '.join(variants)}{hint}"
    pickles = sorted(file for suffix in ("*.bin", "*.pt", "*.ckpt", "*.pth") for file in folder.glob(suffix))
    if pickles and pickled:
        problem = file_problem(pickles[0])
        return f"{pickles[0].name} {problem}" if problem else None
    if pickles:
        hint = "; model.use_safetensors: false takes them, which may run code" if key else "; convert them"
        return f"holds pickled weights alone ({pickles[0].name}){hint}"
    return "holds no weights: no .safetensors file"


def _shards_problem(folder: Path, index: Path) -> str | None:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        return f"{index.name} lists no weights"
    missing = sorted({str(file) for file in listed.values() if not (folder / str(file)).is_file()})
    if missing:
        return f"lacks {len(missing)} of the files that {index.name} lists: {', '.join(missing[:3])}"
    for file in sorted({str(file) for file in listed.values()}):
        try:
            held = {name for name, *_ in read_header(folder / file)}
        except (HeaderError, OSError) as error:
            return f"{file} {error}"
        lost = sorted(name for name, place in listed.items() if place == file and name not in held)
        if lost:
            return f"{file} lacks {len(lost)} weights that {index.name} lists: {', '.join(lost[:3])}"
    return None


def tokenizer_problem(folder: Path) -> str | None:
    """Why a tokenizer's folder has no vocabulary; None where it has one."""
    if any(all((folder / name).is_file() for name in names) for names in VOCABULARIES):
        files = [folder / name for names in VOCABULARIES for name in names if (folder / name).is_file()]
        for file in files:
            with file.open("rb") as stream:
                start = stream.read(len(POINTER))
            if not start or start == POINTER:
                return f"{file.name} is {'a Git LFS pointer: run `git lfs pull`' if start else 'empty'}"
            if file.suffix == ".json" and not read_json(file) and file.stat().st_size < 10_000_000:
                return f"{file.name} is not a JSON object: it is cut or damaged"
        return None
    if (folder / "vocab.json").is_file() or (folder / "merges.txt").is_file():
        return "has half a vocabulary: vocab.json and merges.txt belong together"
    return "has no vocabulary (tokenizer.json, or vocab.json and merges.txt, or spiece.model): every prompt is alike"


def arguments_problems(args: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(argument, why it cannot be loaded) of a reward's arguments that name weights or a folder of them."""
    for name, value in args.items():
        path = Path(value).expanduser() if isinstance(value, str) and value else None
        problem = None
        if path is not None and path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt") and path.is_file():
            problem = file_problem(path)
        elif path is not None and (path / "config.json").is_file():
            speaks = (path / "tokenizer_config.json").is_file()
            problem = weights_problem(path, pickled=True) or (tokenizer_problem(path) if speaks else None)
        if problem:
            yield name, f"{path} {problem}"


NOT_NETWORKS = ("Scheduler", "Processor", "Tokenizer", "FeatureExtractor", "Guider", "Guidance", "Extractor")
"""Parts of a class's name that say that it has no weights."""


def pipeline_problems(
    folder: Path,
    variant: str | None = None,
    *,
    pickled: bool = False,
    left_out: Sequence[str] = (),
    loose: bool = False,
) -> Iterator[tuple[str, str]]:
    """(component, why it cannot be loaded) of a saved pipeline. loose: networks alone, as where a single file has
    theirs, are not looked for."""
    for name, entry in read_json(folder / "model_index.json").items():
        if not (isinstance(entry, list) and len(entry) == 2 and entry[0] and entry[1]) or name in left_out:
            continue
        kind, place = str(entry[1]), folder / name
        if not place.is_dir():
            if str(entry[0]) in ("diffusers", "transformers") and not loose:
                yield name, f"there is no folder {name}, although model_index.json has a {kind} of that name"
        elif "Tokenizer" in kind:  # ByT5's reads bytes
            if "ByT5" not in kind and (problem := tokenizer_problem(place)):
                yield name, f"{name} {problem}"
        elif "Scheduler" in kind:
            if not read_json(place / "scheduler_config.json"):
                yield name, f"{name}/scheduler_config.json is missing or no JSON object"
        elif any(part in kind for part in NOT_NETWORKS):
            continue
        elif not read_json(place / "config.json"):
            yield name, f"{name}/config.json is missing or no JSON object"
        elif not loose and (problem := weights_problem(place, variant, pickled=pickled, key="model.variant")):
            yield name, f"{name} {problem}" if not problem[0].isupper() else f"{name}: {problem}"


Shape = tuple[int, ...]
TIMEOUT_S = 10.0


def unpacked(packed: Sequence[Any]) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor. `#` in a name stands for the numbers of each run, [first, last]."""
    for name, shape, *runs in packed:
        numbers = [number for first, last in runs[0] for number in range(first, last + 1)] if runs else [None]
        for number in numbers:
            yield name if number is None else name.replace("#", str(number)), tuple(shape)


def from_hub(source: str, revision: str | None, folder: Path, hub: Any = None) -> Path:
    """The folder, in which a repository now is without its weights: JSON files whole, .safetensors up to the end of
    their headers. hub: another client than huggingface_hub's. Raises OSError where the hub cannot be asked, or has no
    such repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    hub = hub or HfApi()
    try:
        # Not list_repo_files, which tries for half a minute where there is no network.
        for name in (file.rfilename for file in hub.model_info(source, revision=revision, timeout=TIMEOUT_S).siblings):
            if name.endswith(".json"):
                hub.hf_hub_download(source, name, revision=revision, local_dir=folder)
            elif name.endswith(".safetensors"):
                tensors = hub.parse_safetensors_file_metadata(source, name, revision=revision).tensors
                _write_header(folder / name, tensors)
    except hub_errors(NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise OSError(f"the hub does not say how large it is: {str(error).strip().partition(chr(10))[0]}") from error
    return folder


def hub_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Others, and what huggingface_hub raises where a request fails: OSError, and the errors of the HTTP library that
    this release of it is made with (httpx or httpx2), which it wraps in few places."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*others, *cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__))


def _write_header(file: Path, tensors: Any) -> None:
    """A .safetensors file of these tensors that ends where the first of them would begin."""
    header = {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(tensor.data_offsets)}
        for name, tensor in tensors.items()
    }
    raw = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
