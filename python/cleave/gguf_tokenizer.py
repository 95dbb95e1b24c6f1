"""Rebuild the files of a Hugging Face tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

from .gguf_header import GgufError

# What tokenizer.ggml.pre names: how text is cut before the merges.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
}
_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(metadata: dict[str, object], folder: Path, max_length: int) -> int:
    """Write tokenizer.json and tokenizer_config.json to `folder`; return the number of tokens.

    Raises:
        GgufError: the metadata hold no byte-level BPE tokenizer that can be rebuilt exactly.
        OSError: the files cannot be written.
    """
    tokenizer, settings = rebuild(metadata)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {
        # The generic class takes tokenizer.json as it is; those of single models rebuild parts.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **settings,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return len(vocabulary(metadata))


def rebuild(metadata: dict[str, object]) -> tuple:
    """Return the `tokenizers.Tokenizer`, and of tokenizer_config.json the special tokens by role and
    the chat template.

    Raises:
        GgufError: the metadata hold no byte-level BPE tokenizer that can be rebuilt exactly.
    """
    tokens = vocabulary(metadata)
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {f"{name}_token": token_id(metadata, role) for role, name in roles.items()}
    special = {name: tokens[index] for name, index in ids.items() if index is not None}
    settings = dict(special)
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return _build(metadata, tokens, special), settings


def stop_ids(metadata: dict[str, object]) -> list[int]:
    """Return the ids of the tokens that end an answer, without repeats."""
    ids = [token_id(metadata, role) for role in ("eos", "eot")]
    return list(dict.fromkeys(i for i in ids if i is not None))


def token_id(metadata: dict[str, object], role: str) -> int | None:
    """Return the id of the token with a role ("bos", "eos", ...), or None; GgufError if invalid."""
    index, count = metadata.get(f"tokenizer.ggml.{role}_token_id"), len(vocabulary(metadata))
    if index is not None and not (isinstance(index, int) and 0 <= index < count):
        raise GgufError(f"{role} token {index} was given, but there are {count} tokens")
    return index


def vocabulary(metadata: dict[str, object]) -> list[str]:
    """Return the tokens in order of their ids; GgufError if they are of another kind."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise GgufError(f"tokenizer model '{model}' was given, but only 'gpt2' can be rebuilt")
    if str(pre) not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise GgufError(f"pre-tokenizer '{pre}' was given, but only {known} can be rebuilt")
    lists = [metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges")]
    if not all(isinstance(values, list) for values in lists):
        raise GgufError("the file lacks tokens, token types or merges, but all three are needed")
    if not len(lists[0]) == len(lists[1]) == len(set(lists[0])):
        raise GgufError("the tokens are not all different and with a type, but they must be")
    return lists[0]


def _build(metadata: dict[str, object], tokens: list[str], special: dict[str, str]):
    """Return the `tokenizers.Tokenizer` that the metadata describe."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pre = metadata["tokenizer.ggml.pre"]
    ids = {token: index for index, token in enumerate(tokens)}
    try:
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        # Llama 3 was trained with whole words looked up before the merges.
        model = models.BPE(ids, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # tokenizers raises bare Exception, among others
        what = str(error).partition("\n")[0]
        raise GgufError(f"the merges do not fit the vocabulary: {what}") from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _frame(tokenizer, metadata, ids, special)
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for kind, token in zip(metadata["tokenizer.ggml.token_type"], tokens)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizer(pre: str):
    """Return the step that cuts text into the pieces within which tokens are merged."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_SPLITS[pre] is None)
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([first, byte_level])


def _frame(tokenizer, metadata: dict[str, object], ids: dict, special: dict) -> None:
    """Have `tokenizer` put the tokens around a text that the metadata ask for."""
    from tokenizers import processors

    frame = ["$A"]
    # llama.cpp, for which the file was made, adds the first token to Llama 3 unless told otherwise.
    first = metadata["tokenizer.ggml.pre"] == "llama-bpe"
    if metadata.get("tokenizer.ggml.add_bos_token", first):
        frame.insert(0, special.get("bos_token"))
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        frame.append(special.get("eos_token"))
    if frame == ["$A"]:
        return
    if None in frame:
        raise GgufError("a first or last token is to be added to each text, but it was not named")
    added = [(token, ids[token]) for token in frame if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=added)
