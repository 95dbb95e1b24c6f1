"""The program cleave: what it prints, and how it ends."""

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

import cleave
from cleave.cli import main
from cleave.tokenizer import load_tokenizer

ON_MAIN = ["--units", "main,cpu", "--shares", "1,0", "--min-rows", "1"]


def program(*args, **options) -> subprocess.Popen:
    """The program as others start it, its pipes buffered as they usually are."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-m", "cleave", *map(str, args)]
    return subprocess.Popen(command, env=environment, **options)


@pytest.fixture
def run(model_folder, capsys):
    """Runs ``cleave run`` on the tiny model in this process -> (exit code, stdout, stderr)."""

    def call(*args, model=model_folder):
        code = main(["run", str(model), *ON_MAIN, *map(str, args)])
        return code, *capsys.readouterr()

    return call


def test_text_and_times(run, model_folder):
    code, out, err = run("--prompt", "abc def", "-n", 8)
    runner = cleave.Runner(model_folder, units="main,cpu", shares=[1, 0], min_rows=1)
    tokenizer = load_tokenizer(model_folder)
    expected = tokenizer.decode(list(runner.generate(tokenizer.encode("abc def"), 8)))
    assert code == 0 and out.removesuffix("\n") == expected
    prompt, answer, units = err.splitlines()
    assert prompt.startswith("prompt: 7 tokens in ") and "first token after" in prompt
    assert answer.startswith("answer: 8 tokens, ") and answer.endswith("ended by -n")
    assert units.startswith("partners: cpu; 0 of 0 sites engaged")


def test_json(run):
    code, out, err = run("--prompt", "abc", "-n", 4, "--json")
    figures = json.loads(out)
    assert code == 0 and err == "" and out.count("\n") == 1
    assert figures["prompt_tokens"] == 3 and len(figures["tokens"]) == 4
    assert figures["finish"] == "length" and isinstance(figures["text"], str)
    assert figures["first_token_s"] > figures["prefill_s"] > 0 < figures["decode_tokens_per_s"]
    assert figures["report"]["min_rows"] == 1


def test_ids_files_and_stdin_are_one_prompt(run, tmp_path, model_folder):
    (tmp_path / "p").write_text("abc")
    expected = run("--prompt", "abc", "-n", 20)[1]
    assert expected.strip()
    assert run("--prompt-file", tmp_path / "p", "-n", 20)[1] == expected
    assert run("--ids", "97,98,99", "-n", 20)[1] == expected
    piped = program(
        "run", model_folder, *ON_MAIN, "--prompt-file", "-", "-n", 20, stdin=subprocess.PIPE
    )
    assert piped.communicate(b"abc")[0].decode() == expected and piped.returncode == 0


def test_chat(run, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "m")
    code, out, err = run("--chat", "--prompt", "hi")
    assert code == 1 and "no chat template" in err
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    )
    expected = run("--prompt", "u:hi;")[1]
    assert run("--chat", "--prompt", "hi", model=folder)[1] == expected != run("--prompt", "hi")[1]
    # A system message is a chat.
    assert (
        run("--system", "be", "--prompt", "hi", model=folder)[1] == run("--prompt", "s:be;u:hi;")[1]
    )


def test_sampling_follows_its_seed(run):
    hot = ["--prompt", "abc", "--temp", "2", "-n", "12", "--json"]

    def ids(*more):
        return json.loads(run(*hot, *more)[1])["tokens"]

    assert ids("--seed", 1) == ids("--seed", 1) != ids("--seed", 2)
    assert len(set(map(tuple, (ids("--top-k", 1, "--seed", s) for s in range(3))))) == 1


def test_ids_need_no_tokenizer(run, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    code, out, err = run("--ids", "97,98,99", "-n", 4, model=folder)
    expected = json.loads(run("--ids", "97,98,99", "-n", 4, "--json")[1])["tokens"]
    assert code == 0 and [int(i) for i in out.split(",")] == expected
    assert "no tokenizer.json" in err
    code, out, err = run("--prompt", "abc", model=folder)
    assert code == 1 and out == "" and "no tokenizer.json" in err


@pytest.mark.parametrize(
    "args, message",
    [
        (["--prompt", ""], "empty prompt"),
        (["--prompt", "\udcff"], "not UTF-8"),
        (["--prompt-file", "/nowhere/p"], "No such file"),
        (["--prompt-file", "/"], "Is a directory"),
        (["--ids", "5,300"], "token id 300 and needs ids from 0 to 299"),
        (["--ids", str(2**80)], "token id"),
        (["--prompt", "a", "--units", "warp"], "warp"),
        (["--prompt", "a", "--units", "main,cpu", "--shares", "0.9,0.9"], "shares"),
        (["--prompt", "a", "--top-k", "300"], "top_k 300"),
    ],
)
def test_errors_are_one_sentence(args, message, run):
    code, out, err = run(*args)
    assert code == 1 and out == ""
    assert err.startswith("cleave: [") and err.count("\n") == 1 and message in err


def test_errors_of_files(run, tmp_path, model_folder):
    code, _, err = run("--prompt", "a", model=tmp_path / "absent")
    assert code == 1 and "absent, which does not exist" in err and err.count("\n") == 1
    code, _, err = run("--ids", "1", model=tmp_path / "absent")
    assert code == 1 and "absent, which does not exist" in err and err.count("\n") == 1
    (tmp_path / "p").write_bytes(b"ab\xffc")
    code, _, err = run("--prompt-file", tmp_path / "p")
    assert code == 1 and "byte 0xff at 2" in err
    folder = shutil.copytree(model_folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4}))
    code, _, err = run("--prompt", "abcde", model=folder)
    assert code == 1 and "5 tokens" in err and "context of 4" in err


def test_spare_tokens_are_refused_where_a_prompt_has_them(run, tmp_path, model_folder):
    folder = shutil.copytree(model_folder, tmp_path / "m")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a"] = 300
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    expected = run("--prompt", "b", "-n", 4)[:2]
    assert run("--prompt", "b", "-n", 4, model=folder)[:2] == expected
    code, out, err = run("--prompt", "ba", model=folder)
    assert code == 1 and out == "" and err.count("\n") == 1
    assert "'a', token 300 of" in err and "vocabulary of 300" in err


@pytest.mark.parametrize(
    "args",
    [
        ["--prompt", "a", "-n", "-1"],
        ["--prompt", "a", "-n", "1.5"],
        ["--prompt", "a", "--temp", "nan"],
        ["--prompt", "a", "--temp", "inf"],
        ["--prompt", "a", "--top-p", "2"],
        ["--prompt", "a", "--seed", "-1"],
        ["--prompt", "a", "--shares", "x"],
        ["--prompt", "a", "--tile", "0"],
        ["--prompt", "a", "--ids", "1"],
        ["--ids", "1,"],
        ["--ids", "1", "--chat"],
        [],
    ],
)
def test_wrong_usage(args, run):
    code, out, err = run(*args)
    assert code == 2 and out == "" and "error: " in err.splitlines()[-1]


def test_help_and_versions(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cleave {cleave.__version__}\n"
    assert main(["--help"]) == 0
    assert "run" in capsys.readouterr().out
    assert main(["run", "--help"]) == 0
    assert "--prompt-file" in capsys.readouterr().out
    assert main([]) == main(["fly"]) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk(more, model_folder):
    with open("/dev/full", "w") as full:
        p = program("run", model_folder, *ON_MAIN, "--prompt", "abc", "-n", 20, *more, stdout=full)
        err = p.communicate()[1].decode()
    assert p.returncode == 1
    assert err.count("\n") == 1 and "No space left" in err


def test_a_reader_that_has_seen_enough(model_folder):
    p = program("run", model_folder, *ON_MAIN, "--prompt", "abc", "-n", 5000)
    p.stdout.read(1)
    p.stdout.close()
    assert p.stderr.read() == b"" and p.wait(60) == 141


def test_ctrl_c_while_it_writes(model_folder):
    p = program("run", model_folder, *ON_MAIN, "--prompt", "abc", "-n", 100000)
    p.stdout.read(1)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and err == b"cleave: interrupted\n"


def test_ctrl_c_while_it_reads(model_folder, tmp_path):
    """In a terminal, so that the bar tells when the reading has begun."""
    (tmp_path / "p").write_text("a" * 100_000)  # more than ten seconds, in chunks
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    units = ["--units", "cpu", "--shares", "1", "--min-rows", "1"]
    p = program("run", model_folder, *units, "--prompt-file", tmp_path / "p", stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"prefill" not in seen:
        seen += os.read(ours, 4096)
    begin = time.monotonic()
    p.send_signal(signal.SIGINT)
    assert p.wait(60) == 130 and p.stdout.read() == b""
    assert time.monotonic() - begin < 5
    try:
        while data := os.read(ours, 4096):
            seen += data
    except OSError:  # how a pty ends
        pass
    assert b"interrupted" in seen and b"Traceback" not in seen
