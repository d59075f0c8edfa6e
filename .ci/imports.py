"""Import every module of the library, and the programs beside it, so that their bytecode is there."""

import contextlib
import importlib
import pkgutil

import ondevice

PROGRAMS = ("papermill.cli", "ipykernel.kernelapp", "nbconvert", "nbval", "jupyterlab.labapp", "pytest", "hypothesis",
            "distributed", "openai", "httpx", "fastapi", "transformers.models.llama.modeling_llama",
            "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3",
            "transformers.models.bert.modeling_bert", "transformers.generation.utils")  # fmt: skip

for name in [*(one.name for one in pkgutil.walk_packages(ondevice.__path__, "ondevice.")), *PROGRAMS]:
    if not name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # an extra's
            importlib.import_module(name)
