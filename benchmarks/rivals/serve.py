"""The worker's side of the protocol: one JSON line in, one out, until standard input ends.

{"run": "prefill" | "decode" | "profile", "tokens": N}  ->  {"seconds": [s, ...]} or {"profile": {...}}
or {"error": "one sentence"}. The first line out is {"ready": "what was loaded"} or an error, after which
the worker ends. Every rival's own interpreter runs this file, so it imports nothing of cleave or of them.
"""

import json
import os
import random
import sys
import time


def sentence(error: BaseException) -> str:
    """The first line of what an exception says, or its name."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def token_ids(count: int, vocabulary: int) -> list:
    """The same random ids for every rival, below any vocabulary's special ids' usual place."""
    draw = random.Random(7)
    return [draw.randrange(1000, vocabulary) for _ in range(count)]


def timed(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def serve(load) -> None:
    """load() -> (description, {"prefill": tokens -> seconds, ...}); a handler may also give a list of
    seconds, or a dict, which is sent as it is."""
    # Libraries print to standard output; the protocol keeps it for itself.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**message):
        print(json.dumps(message), file=out)

    try:
        description, handlers = load()
    except Exception as error:
        answer(error=sentence(error))
        return
    answer(ready=description)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            result = handlers[request["run"]](request["tokens"])
        except Exception as error:
            answer(error=sentence(error))
            continue
        if isinstance(result, dict):
            answer(**result)
        else:
            answer(seconds=result if isinstance(result, list) else [result])
