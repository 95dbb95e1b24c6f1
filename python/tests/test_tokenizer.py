"""Text to ids and back: as transformers does it, and without torn characters."""

import json
import random
import shutil

import pytest

from cleave.tokenizer import TextStream, load_tokenizer

TEXTS = (
    "Once upon a time, 1,234 ships.",
    "naïve 日本語 👩‍🚀 e\u0301",
    "  two\n\n\tlines ",
    "<|im_end|>x",
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


def test_ids_are_those_of_transformers(smollm2, tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
    for chat in (CHAT, CHAT[1:]):
        text = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert tokenizer.chat(chat) == theirs(text, add_special_tokens=False)["input_ids"]
        assert "<|im_start|>assistant" in text


def test_a_gguf_file_has_the_tokenizer_of_its_folder(tokenizer):
    from cleave.import_gguf import find_source

    from_file = load_tokenizer(find_source("smollm2"))
    for text in TEXTS:
        assert from_file.encode(text) == tokenizer.encode(text)
    assert from_file.chat(CHAT) == tokenizer.chat(CHAT)


def test_a_stream_never_tears_a_character(tokenizer):
    ids = tokenizer.encode(TEXTS[1])
    stream = TextStream(tokenizer)
    pieces = [stream.add(i) for i in ids]
    assert "" in pieces  # some token was a part of a character
    assert all("\ufffd" not in p for p in pieces)
    assert "".join(pieces) == TEXTS[1] and stream.end() == ""


def test_a_stream_of_any_ids_gives_the_text_of_all(tokenizer):
    draw = random.Random(3)
    for _ in range(200):
        ids = [draw.randrange(49152) for _ in range(draw.randrange(1, 30))]
        stream = TextStream(tokenizer)
        text = "".join(stream.add(i) for i in ids) + stream.end()
        assert text == tokenizer.decode(ids)


def test_a_character_cut_off_at_the_end_is_shown_as_such(tokenizer):
    ids = tokenizer.encode("👩")
    assert len(ids) > 1
    stream = TextStream(tokenizer)
    assert stream.add(ids[0]) == "" and stream.end() == "\ufffd"


def test_a_token_that_the_model_does_not_know(tokenizer):
    ids = tokenizer.encode("The ocean")
    tokenizer.check_ids(ids, max(ids) + 1)
    with pytest.raises(ValueError, match=f"'The', token {ids[0]} of .* vocabulary of {ids[0]}$"):
        tokenizer.check_ids(ids[:1], ids[0])


def with_settings(model_folder, tmp_path, **settings):
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(tmp_path)


def test_templates_of_every_place(model_folder, tmp_path):
    name = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for template in (
        name,
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": name}],
    ):
        t = with_settings(
            model_folder, tmp_path, chat_template=template, bos_token={"content": "#"}
        )
        assert t.decode(t.chat(CHAT)).replace(" ", "") == "#Bebrief.Hi"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}")
    assert load_tokenizer(tmp_path).chat(CHAT) == t.encode("system")


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "no chat template"),
        ("{{ raise_exception('no\n system') }}", "fails: no system"),
        ("{% for %}", "fails: "),
        ("{{ messages + 1 }}", "fails: "),
        ("{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", "fails: "),
    ],
)
def test_bad_templates(template, message, model_folder, tmp_path):
    t = with_settings(model_folder, tmp_path, chat_template=template)
    with pytest.raises(ValueError, match=message) as e:
        t.chat(CHAT)
    assert "\n" not in str(e.value)


def test_bad_files(model_folder, tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    for text in ("", "{}", "[1"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"^\[tokenizer\] .*tokenizer.json cannot be read: .+$"
        ):
            load_tokenizer(tmp_path)
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    for data in (b"[1]", b"{", b"\xff"):
        (tmp_path / "tokenizer_config.json").write_bytes(data)
        with pytest.raises(ValueError, match="tokenizer_config.json"):
            load_tokenizer(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="a.gguf: "):
        load_tokenizer(tmp_path / "a.gguf")
