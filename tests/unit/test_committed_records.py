"""The records in data/records: whole grids, sidecars that history and file names bear out, nothing unlisted.

A seal can be computed anew by who edits a record; these hold against that.
"""

import functools
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ondevice import assets, closure
from ondevice.evidence import records
from ondevice.evidence.sidecars import UNKNOWN, code, digest
from ondevice_studies.diaa import costs, identity, spec_bench
from ondevice_studies.dragon.answers import METHODS as METHODS_OF_ALL
from ondevice_studies.dragon.answers import OF_BOTH
from ondevice_studies.dragon.questions import HOLDERS as SIDED
from ondevice_studies.grating import record as grating
from ondevice_studies.sdnpu import spec_bench as sdnpu
from ondevice_studies.sdnpu import timing
from ondevice_studies.speculation.plain import SPLIT_ANEW

MANIFEST = json.loads((records.folder() / "manifest.json").read_text(encoding="utf-8"))
NAMES = [file.rpartition(".")[0] for file, entry in MANIFEST.items() if "rows" in entry]
REQUEST = ["task", "request"]
# (within, groups, values): where the first columns are equal, all groups of the next ones have the same values.
GRIDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "assistant/answers": (["drafter"], ["picked", "method"], ["question"]),
    "assistant/costs": ([], ["name", "size"], ["round"]),
    "assistant/live": ([], ["systems", "delay"], ["question"]),
    "assistant/memory": ([], ["systems"], ["run"]),
    "diaa/parts": ([], ["model", "method"], ["request"]),
    "diaa/smollm2-identity": ([], ["weights", "arithmetic", "method"], ["request"]),
    "diaa/smollm2-identity-4bit": ([], ["weights", "arithmetic", "method"], ["request"]),
    "diaa/smollm2-quality": ([], ["weights", "arithmetic"], ["window"]),
    "disco/cold_start": ([], ["turn"], ["model", "page_cache"]),
    "disco/device": (["part"], ["model"], ["turn", "request", "token"]),
    "disco/policy_times": ([], ["n", "policy", "what"], ["turn"]),
    "disco/quality": ([], ["direction", "handover"], ["task", "request"]),
    "dragon/answers": (["holder"], ["method"], ["question"]),
    "dragon/latency": ([], ["pace", "delay_ms", "method"], ["question"]),
    "dragon/membership": ([], ["mode", "cap", "with_query"], ["question"]),
    "dragon/schedules": (["setting"], ["strategy", "delay_ms"], ["sequence"]),
    "dragon/lockstep": (["question"], ["side"], ["position"]),
    "dragon/temperatures": ([], ["temperature"], ["window"]),
    "dragon/windows": ([], ["method", "documents", "cap"], ["window"]),
    "grating/calibrated": (["model", "set"], ["k"], ["rule"]),
    "grating/curves": ([], ["model", "k"], ["threshold", "pool"]),
    "grating/latency": (["documents", "tokens"], ["method", "rule", "k"], ["round"]),
    "grating/layers": ([], ["tokens", "round"], ["active"]),
    "grating/scores-applications": (["set"], ["model"], ["pool"]),
    "grating/scores-test": (["set"], ["model"], ["pool"]),
    "grating/scores-validation": (["set"], ["model"], ["pool"]),
    "sdnpu/curves": (["model"], ["part"], ["rows"]),
    "sdnpu/memory": ([], ["model", "context"], ["arm"]),
    "sdnpu/smollm2-own": ([], ["weights", "arithmetic", "method"], ["request"]),
    "sdnpu/profiles": ([], ["model", "cold"], ["block"]),
    "sdnpu/switching": (["memory"], ["tokens", "cold", "way"], ["round"]),
    "sdnpu/whole": (["cold"], ["arm"], REQUEST),
}
DRAFTED = ("diaa/smollm2-", "diaa/qwen-", "sdnpu/smollm2-", "sdnpu/qwen-")  # then the drafter
METHODS = {"diaa": lambda model: spec_bench.METHODS, "sdnpu": sdnpu.recorded_with}
HOLDERS = 4  # of the assistant's documents, who are asked as many questions each
UNITS: dict[str, Callable[[dict[str, Any]], int]] = {  # from a record's parameters
    "assistant/answers": lambda given: HOLDERS * given["each"],
    "assistant/steps": lambda given: HOLDERS * given["each"],
    "diaa/smollm2-identity": lambda given: len(identity.RECORDS["identity"]) * len(identity.NAMES),
    "diaa/smollm2-identity-4bit": lambda given: len(identity.RECORDS["identity-4bit"]) * len(identity.NAMES),
    "diaa/smollm2-quality": lambda given: len({(form.weights, form.arithmetic) for form in costs.FORMATS}),
    "disco/cold_start": lambda given: given["turns"],
    "disco/device": lambda given: given["turns"] * len(given["parts"]) * len(given["models"]),
    "dragon/answers": lambda given: given["questions of a holder"] * (2 * len(METHODS_OF_ALL) + len(OF_BOTH)),
    "dragon/lockstep": lambda given: len(SIDED) * given["questions of a holder"],
    "dragon/membership": lambda given: len(SIDED) * given["questions of a holder"],
    "dragon/temperatures": lambda given: given["windows"],
    "dragon/windows": lambda given: given["windows"],
    "grating/calibrated": lambda given: len(grating.CALIBRATED),
    "grating/smollm2-probes": lambda given: 29,  # all layers of smollm2-reranker but the last
    "sdnpu/smollm2-own": lambda given: len(sdnpu.OWN),
    "sdnpu/whole": lambda given: given["rounds"] * 2 * len(timing.TASKS),  # warm and cold
}


def problems(name: str, table: pd.DataFrame, parameters: dict[str, Any]) -> list[str]:
    """What a record lacks of its grid, in words. name: paper/record, with the machine where it is one's."""
    kind = name.partition(".")[0]
    keys = json.loads((records.folder() / f"{name}.json").read_text(encoding="utf-8"))["keys"]
    lacking = []
    if kind in UNITS and (units := len(table[keys].drop_duplicates())) != UNITS[kind](parameters):
        lacking.append(f"{units} units, not {UNITS[kind](parameters)}")
    if "drafted" in table and kind.startswith(DRAFTED):
        plain = records.load("speculation", f"plain-{kind.partition('/')[2].partition('-')[0]}")
        if not table["request"].isin(SPLIT_ANEW).any():  # recorded since these prompts are split into other tokens
            plain = plain[~plain["request"].isin(SPLIT_ANEW)]
        method = table["method"].iloc[0]
        sized = method.startswith("mixture, sized")
        methods = METHODS[kind.partition("/")[0]](table["model"].iloc[0])
        most = (lambda task: spec_bench.PART) if sized else methods[method].most
        plain = plain.sort_values("request", key=lambda ids: ids.str.rpartition("-")[2].astype(int))
        plain = pd.concat([rows.head(most(task) or len(rows)) for task, rows in plain.groupby("task")])
        behind_the_first = plain.set_index("request")["limit"].sub(1)
        emitted = table.groupby("request")["emitted"].sum().reindex(behind_the_first.index, fill_value=0)
        wrong = int((emitted != behind_the_first).sum())
        lacking += [f"passes of {wrong} requests"] if wrong else []
    if kind in GRIDS:
        within, groups, values = GRIDS[kind]
        columns = {"within": within or [lambda row: 0], "group": within + groups, "value": within + values}
        number = {part: table.groupby(names).ngroup() for part, names in columns.items()}
        cells = pd.DataFrame(number).value_counts().reset_index(name="rows")
        sizes = cells.groupby("within").agg({"group": "nunique", "value": "nunique", "rows": "size"})
        whole = sizes["group"] * sizes["value"] == sizes["rows"]
        if not whole.all() or cells.groupby("value")["rows"].nunique().max() > 1:
            lacking.append(f"{(~whole).sum()} of {len(whole)} grids have gaps")
    return lacking


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_its_whole_grid(name):
    table = records.load(*name.split("/"))
    parameters = table.attrs["sidecar"]["parameters"]
    assert problems(name, table, parameters) == []
    if name.partition(".")[0] in GRIDS:
        dropped = table.sample(max(1, len(table) // 10), random_state=0).index
        assert problems(name, table.drop(index=dropped), parameters)


@pytest.mark.parametrize("name", NAMES)
def test_a_sidecar_says_what_its_file_bears_out(name):
    made = records.sidecar(*name.split("/"))
    if "." in name:
        assert made["machine"] == name.partition(".")[2]
    assert made["minutes"] == UNKNOWN or made["minutes"] >= 0
    if made["parts"] != UNKNOWN:
        assert made["minutes"] == pytest.approx(sum(part["minutes"] for part in made["parts"]), abs=0.01)
    if made["cores"] != UNKNOWN:
        assert made["machine"].endswith(f"-{made['cores']}c")
    assert commits_of(made) and all(re.fullmatch("[0-9a-f]{40}|unknown", commit) for commit in commits_of(made))


@pytest.mark.long  # a history that was joined or lost has not the commits, whatever the code
@pytest.mark.parametrize("name", NAMES)
def test_a_sidecars_commit_is_of_the_history_and_had_its_code(name):
    made = records.sidecar(*name.split("/"))
    commits = commits_of(made)
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("a shallow clone has not the history")
    kept = git("for-each-ref", "refs/records", "--format=%(objectname)").split()
    for commit in set(commits) - {UNKNOWN, *kept}:
        assert git("merge-base", commit, "HEAD") == commit
    if made["code"] != UNKNOWN and len(commits) == 1 and commits[0] != UNKNOWN and not made["dirty"]:
        assert made["code"] == code_at(commits[0], made["program"], not made["code"].startswith("reached-"))


def test_every_file_is_in_the_manifest():
    files = {path.relative_to(records.folder()).as_posix() for path in records.folder().glob("*/*.*")}
    recorded = {f"{name}.json" for name in NAMES}
    assert files == set(MANIFEST) | recorded
    for file in set(MANIFEST) - {file for file, entry in MANIFEST.items() if "rows" in entry}:
        assert records.listed(*file.split("/")).is_file()


def commits_of(made: dict[str, Any]) -> list[str]:
    return [made["commit"]] if isinstance(made["commit"], str) else made["commit"]


def git(*words: str) -> str:
    run = subprocess.run(["git", "-C", assets.ROOT, *words], capture_output=True, text=True, check=False)
    return run.stdout.strip()


@functools.cache
def code_at(commit: str, program: str, whole: bool) -> str:
    """`sidecars.code` of a program as it was at a commit; "unknown" where the commit has not all parts of it.

    whole: of all modules that the program imports, as sidecars had it before they had what its functions reach.
    """
    with tempfile.TemporaryDirectory() as scratch:
        archive = subprocess.run(
            ["git", "-C", assets.ROOT, "archive", commit, "lib", "tests"], capture_output=True, check=True
        )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(scratch, filter="data")
        library = Path(scratch, "lib")
        if not whole:
            return code(program, library)
        modules = [library.joinpath(*name.split(".")).with_suffix(".py") for name in program.split("+")]
        exists = all(module.is_file() for module in modules) or Path(scratch, program).is_file()
        if not exists:
            return UNKNOWN
        script = Path(scratch, program)
        imports = "\n".join(f"import {name}" for name in program.split("+"))
        text = script.read_text(encoding="utf-8") if script.is_file() else imports
        return digest([text, closure.code_hash(library, closure.closure(library, [text]).modules)])
