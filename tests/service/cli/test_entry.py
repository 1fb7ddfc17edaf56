"""The command as it is started: a server's engine process is there before the command line is read."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
from support.servers.server_process import python, wait_until

from snapcap.service.ipc.framing import pack, receive_message

FORKS = """
import os, sys
fork = os.fork
os.fork = lambda: (print("forked", flush=True), fork())[1]
from snapcap.service.cli.entry import main
print("status", main(), flush=True)
"""


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--queue-size", "0"), "snapcap: --queue-size must be a whole number from 1 to 1000000, not '0'"),
        (("--port", "1", "--host", "203.0.113.1"), "cannot listen on 203.0.113.1:1"),
        (("--model", "nowhere/at/all"), "nowhere/at/all"),
    ],
)
def test_a_command_line_that_is_wrong_leaves_no_process(arguments: tuple[str, ...], sentence: str) -> None:
    command = [sys.executable, "-P", "-m", "snapcap", "serve", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        errors = process.communicate()[1]
    assert process.returncode in {1, 2, 3}
    assert sentence in errors.splitlines()[-1]
    assert "Traceback" not in errors
    wait_until(lambda: group_is_gone(process.pid))


@pytest.mark.parametrize("arguments", [("serve", "--help"), ("serve", "--help-all"), ("--version",), ("keygen",)])
def test_only_a_server_forks(arguments: tuple[str, ...]) -> None:
    run = python("-c", FORKS, *arguments)
    assert "forked" not in run.stdout
    assert "Traceback" not in run.stderr


def test_a_server_forks_before_it_reads_its_command_line() -> None:
    run = python("-c", FORKS, "serve", "--queue-size", "0")
    assert run.stdout == "forked\nstatus 2\n"


STANDARD = """
import os, sys
import snapcap.service.cli.main as command
from snapcap.service.cli.entry import main
def ran(arguments, engine):
    null = [os.fstat(number).st_rdev == os.stat(os.devnull).st_rdev for number in range(3)]
    files = (sys.stdin, sys.stdout, sys.stderr)
    there = [each is not None and each.fileno() == number for number, each in enumerate(files)]
    os.write(int(sys.argv[2]), repr((null, there, engine.process.end.fileno() > 2)).encode())
    return 0
command.main = ran
main()
"""


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 1, 2)])
def test_standard_files_that_are_closed_are_nobody_elses(closed: tuple[int, ...]) -> None:
    """As a supervisor may start a server: what native code prints goes to the engine process, or into images."""
    reader, writer = os.pipe()
    shell = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-P", "-c", STANDARD, "serve", str(writer)]
    run = subprocess.run(command, pass_fds=[writer], capture_output=True, stdin=subprocess.PIPE, check=False)
    os.close(writer)
    with open(reader) as said:
        assert said.read() == repr(([number in closed for number in range(3)], [True] * 3, True)), run.stderr


AS_FIRST = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it runs in the background ignore it
os.getpid = lambda: 1
import snapcap.service.cli.main as command
from snapcap.service.cli.entry import main
command.main = lambda arguments, engine: signal.raise_signal(getattr(signal, sys.argv[1]))
sys.exit(main())
"""


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_the_first_process_of_a_container_ends_by_a_signal_at_any_time(number: str, status: int) -> None:
    """The kernel gives it none that it does not handle, so that a pod would end with its grace period."""
    run = python("-c", AS_FIRST, number)
    assert (run.returncode, "Traceback" in run.stderr) == (status, False)


HANDED = """
import os, sys
from snapcap.service.server import processes

def serve(settings, end, pixels, origin, importing):
    import sys
    pixels.open((1, 2))
    from snapcap.service.ipc.shared_pixels import image_file, write_image
    write_image(file := image_file((1, 2)), bytes(range(6)))
    pixels.copy(2, file)
    same = (settings.http.port, settings.compute.device, pixels.slots, origin)
    imported = [name in sys.modules for name in ("numpy", "snapcap.warmup.start.preparation", "torch")]
    end.sendall(repr((same, -1e9 < importing < 1e9, imported)).encode())
    return 5

processes.serve_captions = serve
engine = processes.fork_engine()
for device in sys.argv[1:]:
    engine.reserve(device)
from snapcap.service.config.settings import HttpSettings
from snapcap.service.config.settings import Settings
from snapcap.service.ipc.shared_pixels import SharedPixels
pixels = SharedPixels(3)
pixels.open((1, 2))
engine.hand_over(Settings(http=HttpSettings(port=8123)), pixels, 17.5)
print(engine.process.end.recv(1 << 16).decode())
print(os.waitstatus_to_exitcode(os.waitpid(engine.process.pid, 0)[1]), pixels._mapped()[12:18])
unused = processes.fork_engine()
unused.process.end.close()
print(os.waitstatus_to_exitcode(os.waitpid(unused.process.pid, 0)[1]))
"""


@pytest.mark.parametrize("devices", [(), ("cpu",), ("auto", "cpu")])
def test_the_engine_process_serves_what_it_is_handed_and_ends_where_it_is_handed_nothing(
    devices: tuple[str, ...],
) -> None:
    """In reserve it imports the engine first, without torch."""
    run = python("-c", HANDED, *devices)
    assert run.stdout.splitlines() == [
        f"((8123, 'auto', 3, 17.5), True, [True, {bool(devices)}, False])",
        "5 b'\\x00\\x01\\x02\\x03\\x04\\x05'",
        "0",
    ], run.stderr


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def test_a_message_is_taken_alone_and_with_its_file(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    reader, writer = os.pipe()
    messages = pack("first") + pack({"second": 2}) + b"rest"
    for part in (messages[:3], messages[3:]):
        socket.send_fds(ours, [part], [writer] if part == messages[:3] else [])
    files: list[int] = []
    assert receive_message(theirs, files) == "first"
    assert receive_message(theirs, files) == {"second": 2}
    assert theirs.recv(100) == b"rest"
    (file,) = files
    os.write(file, b"the same")
    assert os.read(reader, 100) == b"the same"
    for each in (reader, writer, file):
        os.close(each)


@pytest.mark.parametrize("cut", [lambda data: b"", lambda data: data[:2], lambda data: data[:-1]])
def test_a_message_that_ends_early(
    ends: tuple[socket.socket, socket.socket], cut: Callable[[bytes], bytes]
) -> None:
    ours, theirs = ends
    ours.sendall(cut(pack("message")))
    ours.close()
    with pytest.raises(EOFError):
        receive_message(theirs, [])
