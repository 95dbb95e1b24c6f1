"""llama.cpp: llama-bench on one GGUF file, started anew for each measurement (it warms up by itself).

serve_llama.py LLAMA_BENCH FILE THREADS
"""

import json
import subprocess
import sys

from serve import serve


def main():
    program, file, threads = sys.argv[1:]

    def bench(prompt: int, generated: int) -> list:
        sizes = ["-p", str(prompt), "-n", str(generated), "-t", threads, "-r", "1", "-o", "json"]
        done = subprocess.run(
            [program, "-m", file, *sizes], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        if done.returncode != 0:
            raise RuntimeError(f"llama-bench ended with code {done.returncode}")
        return [ns / 1e9 for ns in json.loads(done.stdout)[0]["samples_ns"]]

    def load():
        bench(1, 0)
        return file.rsplit("/", 1)[-1], {
            "prefill": lambda tokens: bench(tokens, 0),
            "decode": lambda tokens: bench(0, tokens),
        }

    serve(load)


main()
