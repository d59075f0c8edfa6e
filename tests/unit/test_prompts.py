import json
import re
from collections import Counter
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice import assets, fetched, prompts
from ondevice.prompts import Prompt

LONGEST_SHARED = 5  # words in a row that two prompts may have in common


@pytest.fixture
def no_data(tmp_path, monkeypatch):
    """A machine without a local data folder, with an empty cache."""
    monkeypatch.delenv(assets.LOCAL_DATA_VARIABLE, raising=False)
    monkeypatch.setattr(assets, "ROOT", tmp_path / "clone")
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def sequences(text, length=LONGEST_SHARED + 1):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


@pytest.mark.parametrize("split, per_task", [("test", 10), ("validation", 6)])
def test_each_task_has_its_number_of_own_prompts(split, per_task):
    assert Counter(prompt.task for prompt in prompts.own(split)) == dict.fromkeys(prompts.TASKS, per_task)


def test_own_prompts_share_no_six_words_in_a_row():
    everything = [*prompts.own("test"), *prompts.own("validation")]
    assert len({prompt.id for prompt in everything}) == len(everything) == 96
    holders = {}
    for prompt in everything:
        for words in sequences(prompt.text):
            holders.setdefault(words, set()).add(prompt.id)
    assert not {" ".join(words): ids for words, ids in holders.items() if len(ids) > 1}


def questions(*categories):
    rows = [
        {"question_id": 81 + number, "category": category, "turns": [f"First\u2028of {category}?", "Second?"]}
        for number, category in enumerate(categories)
    ]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def test_spec_bench_gives_first_turns_with_the_papers_tasks(no_data, monkeypatch):
    content = questions("writing", "math", "humanities", "math_reasoning", "translation", "rag")
    checked = replace(fetched.FILES[fetched.SPEC_BENCH], size=len(content), sha256=sha256(content).hexdigest())
    monkeypatch.setitem(fetched.FILES, fetched.SPEC_BENCH, checked)
    folder = no_data / "spec_bench"
    folder.mkdir(parents=True)
    (folder / "question.jsonl").write_bytes(content)
    spec_bench = prompts.spec_bench()
    assert spec_bench[0] == Prompt("spec-bench-81", "mt", "First\u2028of writing?")
    assert [prompt.task for prompt in spec_bench] == ["mt", "mt", "mt", "math", "translation", "rag"]


def test_spec_bench_names_the_command_that_fetches_it_where_it_is_missing_or_another_file(no_data):
    with pytest.raises(FileNotFoundError, match="spec-bench"):
        prompts.spec_bench()
    (no_data / "spec_bench").mkdir(exist_ok=True)
    (no_data / "spec_bench" / "question.jsonl").write_bytes(questions("writing"))
    with pytest.raises(ValueError, match="spec-bench"):
        prompts.spec_bench()


@pytest.mark.skipif(not ((assets.local_data() or assets.ROOT) / "spec_bench").is_dir(), reason="needs Spec-Bench")
def test_spec_bench_has_eighty_questions_per_task():
    assert Counter(prompt.task for prompt in prompts.spec_bench()) == dict.fromkeys(prompts.TASKS, 80)


def test_a_file_has_one_prompt_per_line(tmp_path):
    path = tmp_path / "asked.txt"
    path.write_bytes("\ufeff  What is é?\r\n\r\nTwo {braces}\u2028in a line\n".encode())
    assert prompts.from_file(path) == [
        Prompt("asked-1", "user", "What is é?"),
        Prompt("asked-3", "user", "Two {braces}\u2028in a line"),
    ]


@pytest.mark.parametrize("name", ["asked.jsonl", "asked.txt"])
def test_a_file_has_json_lines(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"prompt": " a\\nb ", "task": "qa"}\n\n{"text": "c", "extra": 1}\n', encoding="utf-8")
    assert prompts.from_file(path) == [Prompt("asked-1", "qa", " a\nb "), Prompt("asked-3", "user", "c")]


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b" \n\r\n", "no prompt"),
        (b"caf\xe9", "UTF-8"),
        (b'{"prompt": "a"}\n{"prompt": ', "Line 2 "),
        (b'{"prompt": "a"}\n"b"\n', "Line 2 "),
        (b'{"prompt": "a"}\n\n{"question": "b"}\n', "Line 3 .*`prompt`"),
        (b'{"prompt": " "}', "Line 1 .*`prompt`"),
        (b'{"prompt": "a", "task": 3}', "Line 1 .*`task`"),
        (b'{"prompt": "\\ud800"}', "Line 1 .*surrogate"),
        (b'{"prompt": ' + b"[" * 100_000, "Line 1 .*JSON"),
        (b'["a", "b"', "JSON"),
        (b'["a", 3]', "Entry 2 .*object"),
        (b'[{"prompt": "a"}, {"question": "b"}]', "Entry 2 .*`prompt`"),
        (b'["a", " "]', "Entry 2 .*`prompt`"),
        (b" [ ]", "no prompt"),
        (b"a\0b", "null character"),
        ("Why?".encode("utf-16"), "UTF-8"),
        ("Why?".encode("utf-16-le"), "null character"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path, content, complaint):
    path = tmp_path / "asked.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as refused:
        prompts.from_file(path)
    assert "asked.txt" in str(refused.value) and "\n" not in str(refused.value)


WRITTEN = {  # how a file has its prompts: of texts and tasks, its content
    "lines": lambda texts, tasks: "\n".join(texts),
    "lines of Windows": lambda texts, tasks: "\ufeff" + "\r\n".join(texts) + "\r\n",
    "JSON lines": lambda texts, tasks: "\n\n".join(json.dumps({"prompt": text}) for text in texts),
    "JSON lines with tasks": lambda texts, tasks: "\n".join(
        json.dumps({"task": task, "text": text}, ensure_ascii=False) for text, task in zip(texts, tasks, strict=True)
    ),
    "an array": lambda texts, tasks: json.dumps(texts),
    "an array on lines": lambda texts, tasks: "\n" + json.dumps(texts, indent=2, ensure_ascii=False) + "\n",
    "an array of objects": lambda texts, tasks: "\ufeff" + json.dumps(
        [{"prompt": text, "task": task} for text, task in zip(texts, tasks, strict=True)], indent=1
    ),
}
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=9)
    .filter(lambda text: text[0] not in "[{\ufeff"), min_size=1, max_size=6,
)  # fmt: skip


@pytest.mark.parametrize("form", WRITTEN)
@given(TEXTS, st.sampled_from(["", ".txt", ".md", ".json", ".jsonl"]), st.randoms())
def test_every_form_of_a_file_gives_the_same_prompts(tmp_path_factory, form, texts, suffix, random):
    suffix = "" if form.startswith("lines") else suffix
    tasks = [random.choice(["qa", "mt"]) for _ in texts]
    path = tmp_path_factory.getbasetemp() / f"every{suffix}"
    path.write_bytes(WRITTEN[form](texts, tasks).encode())
    read = prompts.from_file(path)
    assert [prompt.text for prompt in read] == texts
    assert [prompt.task for prompt in read] == (tasks if "task" in form or "objects" in form else ["user"] * len(texts))


@pytest.mark.parametrize("text", ["[INST] Why? [/INST]", "[1] Why?", "[a](b) is a link.", "# {x}", "'{'"])
def test_a_line_may_begin_with_a_bracket(tmp_path, text):
    (tmp_path / "asked.txt").write_text(f"{text}\nWhy?\n", encoding="utf-8")
    assert [prompt.text for prompt in prompts.from_file(tmp_path / "asked.txt")] == [text, "Why?"]


def test_a_table_of_prompts_is_refused(tmp_path):
    (tmp_path / "asked.csv").write_text("prompt,task\nWhy?,qa\n", encoding="utf-8")
    with pytest.raises(ValueError, match="csv"):
        prompts.from_file(tmp_path / "asked.csv")


def test_a_json_lines_file_of_plain_text_or_a_folder_is_refused(tmp_path):
    (tmp_path / "asked.jsonl").write_text("Why?\n", encoding="utf-8")
    for path in (tmp_path / "asked.jsonl", tmp_path):
        with pytest.raises(ValueError):
            prompts.from_file(path)
