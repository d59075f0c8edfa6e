"""The tokenizer of a GGUF file, of bytes or of SentencePiece, made of the file's own facts as llama.cpp reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ondevice.gguf_header import Header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # types of entries that are matched whole in a text
_ENDS = ("eos", "eot", "eom")  # of a text, a turn and a message
_END_TEXTS = frozenset({
    "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>",
    "<EOT>",
})  # fmt: skip
_SENTENCEPIECE_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}  # of files that do not say them
_GPT_2_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2_PIECES = _LLAMA_3_PIECES.replace(r"\p{N}{1,3}", r"\p{N}")
_DIGITS_APART = ("smollm", "refact", "codeshell", "command-r")  # how texts are split, by the file's own word
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
_PIECES = {  # expressions that split a text one after another
    "gpt-2": [_GPT_2_PIECES],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT_2_PIECES, r"\p{N}+", "[0-9][0-9][0-9]"],
    "qwen2": [_QWEN_2_PIECES],
    "deepseek-r1-qwen": [_QWEN_2_PIECES],
    **{name: [_LLAMA_3_PIECES] for name in _LLAMA_3},
}


def ends(header: Header) -> list[int]:
    """The ids that end an answer, the file's end token first: those that it names by a key, and by a usual text."""
    named = [number for key in _ENDS if (number := _id(header, key)) is not None]
    texts = [
        number
        for number, (text, kind) in enumerate(zip(_entries(header), _kinds(header), strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and text in _END_TEXTS
    ]
    return list(dict.fromkeys([*named, *texts]))


def tokenizer(header: Header) -> PreTrainedTokenizerFast:
    """The file's tokenizer, whose ids are those of the file's entries.

    Raises ValueError, with one sentence, for a kind of tokenizer or a way to split texts that is not known, and for
    entries that contradict each other.
    """
    from transformers import PreTrainedTokenizerFast

    kind = header.facts.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{header.name} has a tokenizer of the kind {kind}; gpt2 and llama can be read.")
    entries = _entries(header)
    if len(set(entries)) < len(entries):
        twice = next(entry for number, entry in enumerate(entries) if entry in entries[:number])
        raise ValueError(f"{header.name} has {twice!r} twice in its vocabulary.")
    backend = _byte_level(header, entries) if kind == "gpt2" else _sentencepiece(header, entries)
    _add_marks(header, backend, entries)
    tokens = {key: entries[number] for key in ("bos", "eos") if (number := _id(header, key)) is not None}
    for key, fact in (("unk", "unknown"), ("pad", "padding")):
        number = _default(header, fact)
        if number is not None and 0 <= number < len(entries):  # converters write an id behind the last one for none
            tokens[key] = entries[number]
    _add_ends(header, backend, tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=header.facts.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{key}_token": text for key, text in tokens.items()},
    )


def _entries(header: Header) -> list[str]:
    entries = header.facts.get("tokenizer.ggml.tokens")
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], str):
        raise ValueError(f"{header.name} has no vocabulary (tokenizer.ggml.tokens).")
    return entries


def _kinds(header: Header) -> Sequence[int]:
    """The type of every entry; without a list all are normal."""
    return _beside(header, "tokenizer.ggml.token_type") or [1] * len(_entries(header))


def _beside(header: Header, key: str) -> list[Any] | None:
    """A list with a value for every entry, None where the file has none."""
    values, count = header.facts.get(key), len(_entries(header))
    if values is not None and (not isinstance(values, list) or len(values) != count):
        raise ValueError(f"{header.name} is damaged: {key} has not one value for each of {count} entries.")
    return values


def _default(header: Header, key: str) -> int | None:
    defaults = _SENTENCEPIECE_DEFAULTS if header.facts.get("tokenizer.ggml.model") == "llama" else {}
    return header.facts.get(f"tokenizer.ggml.{key}_token_id", defaults.get(key))


def _id(header: Header, key: str) -> int | None:
    """A token that the file names. Raises ValueError where the vocabulary has no such entry."""
    number, count = _default(header, key), len(_entries(header))
    if number is not None and not (type(number) is int and 0 <= number < count):
        raise ValueError(f"{header.name} names {number} as its {key} token, but its vocabulary has {count} entries.")
    return number


def _byte_level(header: Header, entries: Sequence[str]) -> Tokenizer:
    """BPE over bytes. Raises ValueError for a way to split texts that is not known, or not said."""
    from tokenizers import Regex, Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

    pieces = header.facts.get("tokenizer.ggml.pre")
    supported = ", ".join([*_PIECES, *_DIGITS_APART])
    steps: list[PreTokenizer]
    if pieces in _DIGITS_APART:
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    elif pieces in _PIECES:
        steps = [Split(Regex(expression), "isolated") for expression in _PIECES[pieces]]
        steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
    elif pieces is None:
        raise ValueError(f"{header.name} does not say how its tokenizer splits text: it has no tokenizer.ggml.pre.")
    else:
        raise ValueError(f"{header.name} splits text as {pieces!r}, which this reader does not know, only {supported}.")
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    merges = header.facts.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ValueError(f"{header.name} has no tokenizer.ggml.merges, which its vocabulary needs.")
    pairs: list[Any] = [tuple(str(merge).split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ValueError(f"{header.name} merges {' '.join(pair)!r}, which its vocabulary does not have.")
    backend = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pieces in _LLAMA_3))
    backend.pre_tokenizer = Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(header: Header, entries: Sequence[str]) -> Tokenizer:
    """BPE over characters, whose merges are those of the entries, the one of the highest score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    scores = _beside(header, "tokenizer.ggml.scores")
    if scores is None:
        raise ValueError(f"{header.name} has no tokenizer.ggml.scores, which its vocabulary needs.")
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    merges = generate_merges(vocabulary, dict(zip(entries, scores, strict=True)))
    unknown = _id(header, "unknown")
    model = models.BPE(
        vocabulary, merges, fuse_unk=True, byte_fallback=True, unk_token=None if unknown is None else entries[unknown]
    )
    backend = Tokenizer(model)
    before = header.facts.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if before else spaces
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if before else steps)
    return backend


def _add_marks(header: Header, backend: Tokenizer, entries: Sequence[str]) -> None:
    """Have control tokens, and what users defined, matched whole."""
    from tokenizers import AddedToken

    for entry, kind in zip(entries, _kinds(header), strict=True):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(entry, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(entry, normalized=False)])


def _add_ends(header: Header, backend: Tokenizer, tokens: dict[str, str]) -> None:
    """Put a begin token before a text and an end token behind it, where the file says so, or its kind does."""
    from tokenizers.processors import TemplateProcessing

    implied = header.facts["tokenizer.ggml.model"] == "llama" or header.facts.get("tokenizer.ggml.pre") in _LLAMA_3
    put = {
        "bos": header.facts.get("tokenizer.ggml.add_bos_token", implied),
        "eos": header.facts.get("tokenizer.ggml.add_eos_token", False),
    }
    missing = [key for key, wanted in put.items() if wanted and key not in tokens]
    if missing:
        raise ValueError(f"{header.name} puts a {missing[0]} token to every text, but names none.")
    begin, end = ([tokens[key]] if wanted else [] for key, wanted in put.items())
    backend.post_processor = TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *begin, "$B", *end],
        special_tokens=[(text, backend.token_to_id(text)) for text in {*begin, *end}],
    )
