"""The parent's side of the protocol in serve.py: a process that is asked for one measurement at a time."""

import json
import os
import select
import signal
import subprocess
import time


class WorkerError(RuntimeError):
    """A rival that does not start, does not answer in time, or answers with an error; one sentence."""


class Worker:
    """A long-lived process of one rival, on the first `threads` cores. Raises WorkerError when it does not get ready."""

    def __init__(self, command: list, threads: int, log, environment=None, seconds: float = 120):
        cores = sorted(os.sched_getaffinity(0))[:threads]
        self._log = open(log, "ab")
        # A session of its own: Ctrl-C reaches the parent alone, which then ends its workers.
        self._process = subprocess.Popen(
            [str(c) for c in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            start_new_session=True,
        )
        self._buffer = b""
        try:
            self.ready = self._receive(seconds)["ready"]
        except BaseException:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def run(self, what: str, tokens: int, seconds: float):
        """The answer to one request, a dict. Raises WorkerError; after a time-out the worker is gone."""
        if self.ended:
            raise WorkerError(f"its process ended with code {self._process.returncode}")
        try:
            self._process.stdin.write(json.dumps({"run": what, "tokens": tokens}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError("its process ended") from None
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict:
        end = time.monotonic() + seconds
        out = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([out], [], [], max(0, end - time.monotonic()))[0]:
                self.close()
                raise WorkerError(f"no answer within {seconds:.0f} s")
            part = os.read(out, 1 << 16)
            if not part:
                code = self._process.wait()
                raise WorkerError(f"its process ended with code {code} (log: {self._log.name})")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise WorkerError(f"it answered {line[:60]!r}, which is no JSON") from None
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process and what it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            try:
                file.close()
            except BrokenPipeError:
                pass
