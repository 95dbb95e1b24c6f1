"""Text to token ids and back, by the tokenizer that lies with a model."""

import json
from datetime import datetime
from pathlib import Path

from tokenizers import Tokenizer as Library

UNKNOWN = "\ufffd"  # what bytes that are no UTF-8 decode to


class Tokenizer:
    """A tokenizer of the library `tokenizers`, with the special tokens and chat template of a model."""

    def __init__(self, library: Library, settings: dict, source: str):
        """settings: of tokenizer_config.json, "bos_token" and the like and "chat_template"; source:
        where they are from, for messages."""
        self._library, self._settings, self._source = library, settings, source

    def check_ids(self, ids: list, vocab: int) -> None:
        """Raises ValueError for an id that is none of a model with ``vocab`` tokens. Tokenizers may well
        know more, such as spare tokens of a fine-tuned model, as long as no prompt has them."""
        for i in ids:
            if i >= vocab:
                raise ValueError(
                    f"[tokenizer] got {self._library.id_to_token(i)!r}, token {i} of {self._source}, and "
                    f"needs ids below the model's vocabulary of {vocab}"
                )

    def encode(self, text: str) -> list:
        """The ids of a text, with what the tokenizer puts around each. ValueError for text that is
        no Unicode."""
        first = self._settings.get("bos_token")
        return self._encode(text, not (first and text.startswith(first)))

    def chat(self, messages: list) -> list:
        """The ids of a conversation up to where the answer begins, by the model's chat template.

        messages: dicts of "role" and "content". Raises ValueError when there is no template or it
        refuses the messages.
        """
        return self._encode(self._render(messages), False)

    def decode(self, ids: list) -> str:
        """The text of ids, without special tokens."""
        return self._library.decode(ids, skip_special_tokens=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # bytes of a command line that are no text
            raise ValueError("[tokenizer] got a text that is not UTF-8, and needs one") from None
        return self._library.encode(text, add_special_tokens=add_special_tokens).ids

    def _render(self, messages: list) -> str:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self._settings.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        if not template:
            raise ValueError(
                f"[tokenizer] got a chat, and {self._source} has no chat template: use a plain prompt"
            )

        def refuse(message):
            raise jinja2.TemplateError(message)

        # What templates may expect is what transformers gives them.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda x, indent=None: json.dumps(
            x, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        special = {k: v for k, v in self._settings.items() if k.endswith("_token")}
        try:
            return environment.from_string(template).render(
                messages=messages, add_generation_prompt=True, **special
            )
        except (jinja2.TemplateError, TypeError, ValueError) as e:
            raise ValueError(
                f"[tokenizer] the chat template of {self._source} fails: {one_line(e)}"
            ) from e


class TextStream:
    """Text of ids that come one by one; never a part of a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Some decoders treat the first token apart, so the last ones already shown are decoded again.
        self._ids, self._shown = [], 0

    def add(self, token: int) -> str:
        """The text that is certain now; "" while a character is not complete."""
        self._ids.append(token)
        new = self._hidden()
        if not new or new.endswith(UNKNOWN):
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return new

    def end(self) -> str:
        """What is left, where the last character was never completed."""
        new, self._ids, self._shown = self._hidden(), [], 0
        return new

    def _hidden(self) -> str:
        shown = self._tokenizer.decode(self._ids[: self._shown])
        return self._tokenizer.decode(self._ids)[len(shown) :]


def load_tokenizer(path) -> Tokenizer:
    """The tokenizer of a model folder (tokenizer.json) or of a .gguf file.

    Raises ValueError, naming the file, when it is missing, damaged or of a kind that cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return _from_gguf(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"[tokenizer] got no tokenizer.json in {path}: give token ids instead")
    try:
        library = Library.from_file(str(file))
    except Exception as e:  # tokenizers raises bare Exception
        raise ValueError(f"[tokenizer] {file} cannot be read: {one_line(e)}") from e
    return Tokenizer(library, _settings(path), str(file))


def _from_gguf(path: Path) -> Tokenizer:
    from cleave.gguf_header import GgufError, read_header
    from cleave.gguf_tokenizer import rebuild

    if path.suffix != ".gguf" or not path.exists():
        what = "is no folder" if path.exists() else "does not exist"
        raise ValueError(
            f"[tokenizer] got {path}, which {what}, and needs a model folder or a .gguf file"
        )
    try:
        return Tokenizer(*rebuild(read_header(path).metadata), str(path))
    except GgufError as e:
        raise ValueError(f"[tokenizer] {path}: {e}") from e


def _settings(folder: Path) -> dict:
    settings = {}
    file = folder / "tokenizer_config.json"
    if file.is_file():
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"[tokenizer] {file} cannot be read: {one_line(e)}") from e
        if not isinstance(settings, dict):
            raise ValueError(f"[tokenizer] got {file} without an object, and needs one")
    for name, value in settings.items():  # tokens may be objects that say how they are matched
        if name.endswith("_token") and isinstance(value, dict):
            settings[name] = value.get("content")
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    return settings


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
