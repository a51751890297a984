"""The way in from a shell: what is imported when, and a process that starts itself again with settings of glibc."""

import json
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import hf_ga
from hf_ga.run import host_memory, start

IS_GLIBC = platform.libc_ver()[0] == "glibc"
ALL = "glibc.malloc.tcache_count=0:glibc.malloc.hugetlb=1"
STARTED = """
import json, os, sys
from hf_ga.run import start
start.DRIVERS = ()
print("once", file=sys.stderr)
start.start_again()
names = {"torch", "transformers"} & set(sys.modules)
print(json.dumps([os.getpid(), os.environ[start.TUNABLES], sys.argv[1:], sys.flags.dont_write_bytecode, sorted(names)]))
"""
# Two freed blocks with a freed small one between them: is there room for one as large as both?
JOINED = """
import ctypes, runpy, sys, torch
if sys.argv[2] == "set":
    runpy.run_path(sys.argv[1])["keep_freed_memory"](torch.device("cpu"))
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size, small = 64 << 20, 1000
first = c.malloc(size)
while not 0 <= (between := c.malloc(small)) - first - size < small:  # until all holes elsewhere are filled
    pass
second, end = c.malloc(size), c.malloc(small)
assert 0 <= second - between - small < small
for block in (first, between, second):
    c.free(block)
print(c.malloc(2 * size) == first)
"""


def plain_environment():
    return {name: value for name, value in os.environ.items() if name != start.TUNABLES}


def test_public_names_are_where_the_package_says():
    assert hf_ga.__all__ == sorted(hf_ga._HOME) and set(hf_ga.__all__) <= set(dir(hf_ga))
    for name in hf_ga.__all__:
        assert getattr(hf_ga, name).__module__.startswith("hf_ga."), name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        hf_ga.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("libc", "there", "tunables", "added"),
    [
        ("glibc", [], None, ALL),
        ("glibc", [], "glibc.malloc.check=3", f"glibc.malloc.check=3:{ALL}"),
        ("glibc", [], "glibc.malloc.hugetlb=2", "glibc.malloc.hugetlb=2:glibc.malloc.tcache_count=0"),
        ("glibc", [], "glibc.malloc.tcache_count=7:glibc.malloc.hugetlb=0", None),
        ("glibc", ["/dev/nvidiactl"], None, None),
        ("glibc", ["/dev/kfd"], None, None),
        ("", [], None, None),
    ],
    ids=["glibc", "more tunables", "one set", "all set", "CUDA", "ROCm", "another library"],
)
def test_what_is_added_to_the_environment(libc, there, tunables, added, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(os.path, "exists", lambda path: path in there)
    monkeypatch.delenv(start.TUNABLES, raising=False)
    if tunables:
        monkeypatch.setenv(start.TUNABLES, tunables)
    assert start.environment() == ({start.TUNABLES: added} if added else {})


@pytest.mark.launch
@pytest.mark.skipif(not IS_GLIBC, reason="nothing is done with other C libraries")
def test_a_process_starts_itself_again_once(tmp_path):
    """Same process id, flags of Python and arguments; nothing heavy is imported before."""
    script = tmp_path / "started.py"
    script.write_text(STARTED)
    command = [sys.executable, "-B", str(script), "--flag", "a b"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=plain_environment())
    out, errors = process.communicate(timeout=120)
    assert errors.split() == ["once", "once"]
    assert json.loads(out) == [process.pid, ALL, ["--flag", "a b"], 1, []]


@pytest.mark.parametrize("entry", ["script", "hf-ga"])
def test_command_lines_begin_there(entry, monkeypatch):
    """Catches an entry point that goes straight to the command line."""

    class Started(Exception):
        pass

    def execve(path, arguments, environment):
        assert path == arguments[0] == sys.executable and arguments[1:] == sys.orig_argv[1:]
        assert environment["ADDED"] == "1" and environment["PATH"] == os.environ["PATH"]
        raise Started

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(start, "environment", lambda: {"ADDED": "1"})
    with pytest.raises(Started):
        if entry == "script":
            runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "finetune.py"), run_name="__main__")
        else:
            start.main()


@pytest.mark.launch
@pytest.mark.skipif(not IS_GLIBC, reason="nothing is done with other C libraries")
def test_freed_blocks_are_joined(monkeypatch):
    monkeypatch.setattr(start, "DRIVERS", ())
    monkeypatch.delenv(start.TUNABLES, raising=False)

    def joined(settings, environment):
        command = [sys.executable, "-c", JOINED, host_memory.__file__, settings]
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True, env=plain_environment() | environment
        )
        return run.stdout.strip() == "True"

    assert joined("set", start.environment())
    assert not joined("set", {}), "control: the cache of the thread keeps the small block"
