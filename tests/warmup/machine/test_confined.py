"""Attacks by code that has taken over a process which decodes images or tokenizes prompts."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.servers.server_process import clean_environment as environment_of_tests
from support.servers.server_process import python

from snapcap.warmup.machine import confined
from snapcap.warmup.machine.confined import clean_environment

SECRET = "a-secret-of-" + "aws-1234567890"
# Each attack is an expression. It may succeed (its value is printed) or fail (its error's name is).
ATTACKS = {
    "open a file": "open('/etc/passwd').read(5)",
    "read the parent's memory": "open(f'/proc/{PARENT}/mem', 'rb')",
    "read its own environment anew": "open('/proc/self/environ').read()",
    "write a file": "open('/tmp/snapcap-attack', 'w')",
    "open a socket": "socket.socket()",
    "make a pair of sockets": "socket.socketpair()",
    "fork": "os.fork() or os._exit(0)",
    "start a program": "os.execv('/bin/true', ['true'])",
    "signal the parent": "os.kill(PARENT, 0)",
    "signal its group": "os.killpg(0, 0)",
    "signal a thread of the parent": "call(234, PARENT, PARENT, 0)",
    "limit the parent": "resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (1, 1))",
    "trace the parent": "call(101, 16, PARENT, 0, 0)",
    "read another's memory": "call(310, PARENT, 0, 0, 0, 0, 0)",
    "have the kernel work for it": "call(425, 1, 0)",
    "be sent signals of files": "fcntl.fcntl(1, fcntl.F_SETOWN, PARENT)",
    "become readable": "call(157, 4, 1, 0, 0, 0)",
    "list a folder": "os.listdir('/')",
    "remove a file": "os.unlink('/tmp/snapcap-attack')",
    "make a file in memory": "os.memfd_create('x')",
    "change its user": "os.setuid(65534)",
}
WORK = {
    "take memory": "len(bytearray(64 << 20))",
    "limit itself": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.getrlimit(resource.RLIMIT_AS)[1]))",
    "signal itself, as abort() does": "call(234, os.getpid(), threading.get_native_id(), 0)",
    "use its files": "[os.pwrite(FILE, b'abc', 0), os.pread(FILE, 3, 0).decode()]",
    "use its sockets": "[THERE.send(b'x'), HERE.recv(1).decode()]",
    "draw a random number": "len(os.urandom(4))",
    "know the time": "time.time() > time.process_time()",
    "say how it failed": "traceback.format_exception(ValueError('so'))[-1]",
}
THREAD = "[it := threading.Thread(target=seen.append, args=(7,)), it.start(), it.join(), seen][3]"
PROGRAM = """
import ctypes, fcntl, json, os, resource, socket, sys, threading, time, traceback
from snapcap.warmup.machine.confined import confine, forget_environment

attacks, PARENT, seen = json.loads(sys.stdin.read()), os.getppid(), []
FILE, (HERE, THERE) = os.memfd_create("test"), socket.socketpair()
libc = ctypes.CDLL(None, use_errno=True)
environ = open("/proc/self/environ", "rb", buffering=0)

def call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def secret_in_memory():
    # Written so that the program itself does not have the secret in one piece.
    wanted = ("a-secret-of-" + "aws-").encode() + b"1234567890"
    found = 0
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            fields = line.split()
            if "r" not in fields[1] or line.endswith(("[vvar]\\n", "[vsyscall]\\n", "[vvar_vclock]\\n")):
                continue
            first, end = (int(each, 16) for each in fields[0].split("-"))
            memory.seek(first)
            try:
                found += memory.read(end - first).count(wanted)
            except OSError:
                pass
    return found

if "forget" in sys.argv:
    forget_environment()
copies = secret_in_memory() - 1  # the bytes that are looked for
confine(threads="threads" in sys.argv)
found = {"secret": [copies, environ.read().count(b"a-secret"), "AWS_SECRET_ACCESS_KEY" in os.environ]}
libc.getenv.restype = ctypes.c_char_p
found["getenv"] = libc.getenv(b"AWS_SECRET_ACCESS_KEY")
for name, attack in attacks.items():
    try:
        found[name] = [True, eval(attack)]
    except BaseException as error:
        found[name] = [False, type(error).__name__]
print(json.dumps(found, default=str))
"""


def attacked(*arguments: str) -> dict[str, Any]:
    """Returns the result of each attack, and of each call that a process needs to work."""
    environment = environment_of_tests(AWS_SECRET_ACCESS_KEY=SECRET, HF_TOKEN="hf_1234567890")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        input=json.dumps(ATTACKS | WORK | {THREAD: THREAD}),
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    if "seccomp is not available" in run.stderr:
        pytest.skip("THIS MACHINE DENIES SECCOMP: " + run.stderr)
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return attacked("forget")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_confined_process_reaches_nothing_but_its_memory_and_open_files(
    attack: str, found: dict[str, Any]
) -> None:
    assert found[attack] in ([False, "PermissionError"], [False, "OSError"], [False, "BlockingIOError"]), attack


def test_a_confined_process_can_work(found: dict[str, Any]) -> None:
    values = {name: found[name] for name in WORK}
    assert values == {
        "take memory": [True, 64 << 20],
        "limit itself": [True, None],
        "signal itself, as abort() does": [True, 0],
        "use its files": [True, [3, "abc"]],
        "use its sockets": [True, [1, "x"]],
        "draw a random number": [True, 4],
        "know the time": [True, True],
        "say how it failed": [True, "ValueError: so\n"],
    }


def test_threads_are_for_processes_whose_library_needs_them(found: dict[str, Any]) -> None:
    assert found[THREAD] == [False, "RuntimeError"]
    more = attacked("threads")
    assert more[THREAD] == [True, [7]]
    assert more["fork"] == [False, "PermissionError"]


def test_a_process_that_forgot_its_environment_has_no_secret_left(found: dict[str, Any]) -> None:
    copies, in_proc, known = attacked()["secret"]
    assert copies >= 2, "in the kernel's block, and as Python has it"
    assert (in_proc, known) == (1, True)
    assert (found["secret"], found["getenv"]) == ([0, 0, False], None)


def test_a_process_of_any_name_forgets_its_environment() -> None:
    """The kernel cuts a name after 15 bytes, also in the middle of a letter."""
    program = (
        "import ctypes; from snapcap.warmup.machine.confined import forget_environment\n"
        "ctypes.CDLL(None).prctl(15, 'servidor-de-imágenes'.encode()); forget_environment()\n"
        "print(open('/proc/self/environ', 'rb').read().count(b'a-secret'))"
    )
    done = python("-c", program, AWS_SECRET_ACCESS_KEY=SECRET)
    assert done.stdout == "0\n", done.stderr


def test_a_child_gets_no_secret_of_its_parents_environment() -> None:
    given = {
        "PATH": "/bin",
        "PYTHONPATH": "/x",
        "LD_LIBRARY_PATH": "/y",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "HF_TOKEN": "hf",
        "SNAPCAP_API_KEY_FILE": "/keys",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }
    assert clean_environment(given) == {"PATH": "/bin", "PYTHONPATH": "/x", "LD_LIBRARY_PATH": "/y"}


@pytest.mark.parametrize(
    ("header", "place"),
    [("x86_64-linux-gnu/asm/unistd_64.h", 0), ("asm-generic/unistd.h", 1)],
    ids=["x86_64", "aarch64"],
)
def test_calls_have_the_numbers_of_the_kernels_headers(header: str, place: int) -> None:
    file = Path("/usr/include") / header
    if not file.exists():
        pytest.skip(f"NO {file}: THE NUMBERS OF SYSTEM CALLS ARE NOT COMPARED")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read_text()))
    calls = confined._CALLS | {
        "clone": confined._CLONE,
        "clone3": confined._CLONE3,
        "prlimit64": confined._PRLIMIT64,
        "seccomp": confined._SECCOMP,
    }
    numbers = {name: str(places[place]) for name, places in calls.items() if places[place] is not None}
    assert numbers == {name: defined[name] for name in numbers}


def test_where_the_filter_is_denied_it_is_said_once() -> None:
    program = (
        "import os\n"
        "from snapcap.warmup.machine.confined import confine\n"
        "os.uname = lambda: os.uname_result(['Linux', 'x', '6', '1', 'riscv64'])\n"
        "for _ in range(2): confine()\n"
        "print(open('/proc/self/comm').read() != '')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment_of_tests(),
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "True\n", "it goes on"
    assert run.stderr.count("seccomp is not available") == 1
