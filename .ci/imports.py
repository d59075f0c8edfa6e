"""Import every module of the library, and the programs beside it, so that their bytecode is there."""

import contextlib
import importlib
import pkgutil

import ondevice
import ondevice_papers
import ondevice_programs
import ondevice_studies
import ondevice_training

PROGRAMS = ("papermill.cli", "ipykernel.kernelapp", "nbconvert", "nbval", "jupyterlab.labapp", "pytest", "hypothesis",
            "distributed", "openai", "httpx", "fastapi", "transformers.models.llama.modeling_llama",
            "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3",
            "transformers.models.bert.modeling_bert", "transformers.generation.utils")  # fmt: skip

LIBRARY = (ondevice, ondevice_papers, ondevice_programs, ondevice_studies, ondevice_training)
MODULES = [module.name for package in LIBRARY for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]

for name in [*MODULES, *PROGRAMS]:
    if not name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # an extra's
            importlib.import_module(name)
