"""Every test file in a fork of its own: python tests/each_file.py [FILES] [OPTIONS OF PYTEST]

Axolotl, lm-eval, mergekit and bitsandbytes change global state when they are used, so files share
no process. Their import takes 10 s: this process does it once."""

import atexit
import gc
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import once  # noqa: F401  the libraries, imported


def start(words: list[str], output: int) -> int:
    """The process id of a fork that runs pytest. It does not take apart what was imported (4 s)."""
    if child := os.fork():
        return child
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = int(sys.modules["pytest"].main(["-W", "ignore:Module already imported", *words]))
    atexit._run_exitfuncs()  # pytest clears its temporary folders there
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    began, running, bad, passed = time.monotonic(), {}, [], 0
    os.chdir(Path(__file__).parent.parent)
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it
    gc.freeze()  # the forks share these objects instead of walking through them
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(3, min(os.cpu_count() or 1, memory >> 32))  # up to 4 GiB each
    options = [word for word in sys.argv[1:] if not word.endswith(".py")]
    files = [Path(word) for word in sys.argv[1:] if word.endswith(".py")]
    files = files or [*Path().glob("tests/test_*.py"), *Path().glob("research/tests/test_*.py")]
    texts = {path: path.read_text("utf-8") for path in files}  # the short ones last
    files.sort(key=lambda path: (texts[path].count("mark.slow"), len(texts[path])))
    while running or files:
        while files and len(running) < most:  # some wait for their processes
            path, output = files.pop(), tempfile.TemporaryFile()
            running[start([str(path), *options], output.fileno())] = (path, output)
        child, status, used = os.wait4(-1, 0)
        (path, output), code = running.pop(child), os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().decode(errors="replace")
        last = re.findall(r"^=*(.*? in [\d.]+s.*?)=*$", said, re.M) or [f"ended with {code}"]
        passed += sum(map(int, re.findall(r"(\d+) passed", last[-1])))
        print(f"{path.name:<36}{last[-1]}, {used.ru_utime:.0f} s of processor", flush=True)
        if code not in (0, 5):  # 5: the options leave no test
            bad += [path.name]
            print(said[-6000:], flush=True)
    print(f"{time.monotonic() - began:.0f} s, {passed} passed, files that fail: {bad}", flush=True)
    os._exit(bool(bad))


if __name__ == "__main__":  # not in workers that a test spawns
    main()
