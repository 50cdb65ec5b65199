"""Programs in fresh processes, forked from one that has imported what takes longest, and nothing that is tested."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_SERVER = """
import json, os, sys
import torch._dynamo
for line in sys.stdin:
    program, argv, *outputs = json.loads(line)
    if not (child := os.fork()):
        for stream, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
        sys.argv[1:] = argv
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)  # taking all modules down takes a second
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
_SCRIPT = """
import runpy, sys, warnings
sys.argv = sys.argv[1:]
sys.warnoptions.append("error")  # for the processes that it starts
warnings.simplefilter("error")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SERVER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_fresh(program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """What `python -c PROGRAM ARGV` prints and ends with, in this environment as it was at the first of these calls."""
    with TemporaryDirectory() as folder:
        outputs = Path(folder, "out"), Path(folder, "err")
        print(json.dumps([program, argv, *map(str, outputs)]), file=_server().stdin, flush=True)
        status = int(_server().stdout.readline())  # type: ignore[union-attr]
        return subprocess.CompletedProcess([program, *argv], status, *(path.read_text() for path in outputs))


def run_script(script: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The same of `python -W error SCRIPT ARGV`. All that are forked here have one order of sets of strings."""
    return run_fresh(_SCRIPT, str(script), *argv)
