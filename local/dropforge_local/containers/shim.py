"""The process between the local stack and one container, as containerd-shim is between containerd and runc.

Usage: python -I -S shim.py DIRECTORY LOG_BYTES WORKDIR COMMAND [ARGUMENT...]; the container's environment is its own.
Without arguments it forks a shim for each request on its standard input (shims.py): the fork saves the interpreter's
start, three quarters of a shim's CPU. The shim executes the container's command in both cases.
A shim outlives the stack. It writes the container's output to DIRECTORY/output.log (rotated once, so never above
LOG_BYTES) and, when all processes of the container have ended, "CODE TIME" to DIRECTORY/exit.
It imports little, and only from the standard library, because it starts with every container. The imports of `signal`
and `ctypes` would take longer than everything else, so it uses the modules below them.
"""

from __future__ import annotations

import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from _socket import socket
    from collections.abc import Callable
else:
    import _signal as signal

LOG = "output.log"
SHIM_LOG = "shim.log"
TIMES = "output.times"
MARK_SECONDS = 0.5
EXIT_BYTES = 64
MARKER = "DROPFORGE_CONTAINER_ID"
PATH_BYTES = 4096  # PATH_MAX of Linux
REQUEST_BYTES = 1 << 17
READY = b"ready"
PR_SET_CHILD_SUBREAPER = 36
HAS_PROC = os.path.exists("/proc/self/stat")  # Linux lists its processes there, macOS nowhere
UNADOPTED = "unadopted"


def main(directory: str, log_bytes: str, workdir: str, *command: str) -> int:
    os.setsid()
    # Only the process that creates the claim runs the command, so a container never starts twice, even after a kill.
    os.close(os.open(os.path.join(directory, "claim"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    exit_file = reserve_exit(directory)
    adopt_orphans(directory)
    output, output_writer = os.pipe()
    wake, wake_writer = os.pipe()
    for descriptor in (output, wake, wake_writer):
        os.set_blocking(descriptor, False)
    ignore_signals(wake_writer)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the command must not miss a SIGTERM while it starts
    child = os.fork()
    if child == 0:
        run_command(workdir, list(command), output_writer)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(output_writer)
    log = RotatingLog(os.path.join(directory, LOG), int(log_bytes))
    code = supervise(child, output, wake, log)
    kill_leftovers(child)
    drain(output, log)
    write_exit(directory, exit_file, code)
    return 0


def serve() -> None:
    """Fork a shim for each request of the stack; end when the stack ends. Only on Linux.

    A request has NUL-separated fields: the number of arguments, the arguments of `main`, then the variables of the
    container's environment as NAME=VALUE. The shim answers with its pid.
    """
    import _ctypes  # noqa: F401 - for adopt_orphans in the shims
    import _socket
    import gc

    stack = _socket.socket(fileno=0)
    write_mark("")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: has_children())  # collects ended shims
    gc.disable()
    stack.send(READY)
    while request := stack.recv(REQUEST_BYTES):
        if os.fork() == 0:
            become_shim(stack, [os.fsdecode(field) for field in request.split(b"\0")])


def become_shim(stack: socket, fields: list[str]) -> None:
    """In the forked child: do what a new process does, and exit.

    The order matters. A marked process is found by the next stack. A stack that was killed gets no answer, and the
    container does not begin, because the next stack may have looked for its processes before the mark was there.
    """
    code = 1
    try:
        count = int(fields[0])
        arguments, variables = fields[1 : count + 1], fields[count + 1 :]
        write_mark(arguments[0])
        stack.send(str(os.getpid()).encode())
        log = os.open(os.path.join(arguments[0], SHIM_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):  # closes the connection, which is descriptor 0
            os.dup2(source, target)
        os.close(log)
        os.close(null)
        os.environ.clear()
        os.environ.update(dict(variable.split("=", 1) for variable in variables))
        code = main(*arguments)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def write_mark(directory: str) -> None:
    """Make /proc/PID/environ name the container's directory, by which other processes find this process.

    The kernel shows the memory in which the process found its environment at its start, and `os.environ` does not
    write there. The stack has reserved the place: a value of PATH_BYTES. Raises OSError or ValueError.
    """
    with open("/proc/self/stat", "rb") as stat:
        start, end = map(int, stat.read().rpartition(b")")[2].split()[47:49])
    mark = f"{MARKER}={directory}".encode(errors="surrogateescape") + b"\0"
    if len(mark) > end - start:
        raise ValueError(f"the path {directory!r} needs {len(mark)} bytes in an environment of {end - start} bytes")
    memory = os.open("/proc/self/mem", os.O_WRONLY)
    os.pwrite(memory, mark.ljust(end - start, b"\0"), start)
    os.close(memory)
    with open("/proc/self/environ", "rb") as environment:
        if not environment.read().startswith(mark):
            raise OSError("/proc/self/environ does not show what /proc/self/mem has taken")


def adopt_orphans(directory: str) -> None:
    """Become the parent of every orphaned descendant, so that `kill_leftovers` finds all of them.

    Only Linux can do this. Elsewhere the file UNADOPTED makes the stack look for them by their mark.
    """
    if not (HAS_PROC and becomes_subreaper()):
        os.close(os.open(os.path.join(directory, UNADOPTED), os.O_CREAT | os.O_WRONLY, 0o600))


def becomes_subreaper() -> bool:
    import _ctypes

    try:
        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    except OSError:
        return False
    return bool(_ctypes.call_function(prctl, (PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0)


def ignore_signals(wake_writer: int) -> None:
    # Handlers, not SIG_IGN: an ignored signal would stay ignored in the command.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)


def run_command(workdir: str, command: list[str], output_writer: int) -> None:
    """In the forked child: execute the command, or print why it cannot start and exit as a shell does (126, 127)."""
    signal.set_wakeup_fd(-1)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output_writer, 1), (output_writer, 2)):
        os.dup2(source, target)
    for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    try:
        os.chdir(workdir)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r} in {workdir!r}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def supervise(child: int, output: int, wake: int, log: RotatingLog) -> int:
    """Copy output until the command has ended; return its exit code, or 128 + signal if a signal killed it."""
    sources = [output, wake]
    while True:
        readable, _, _ = select.select(sources, [], [])
        if output in readable and not copy(output, log):
            sources.remove(output)
        if wake in readable:
            os.read(wake, 4096)
            if (code := reap(child)) is not None:
                return code


def reap(child: int) -> int | None:
    """Collect every ended process; return the command's exit code once the command has ended, else None."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code


def copy(output: int, log: RotatingLog) -> bool:
    """Copy the available output to the log; False at the end of the stream."""
    try:
        data = os.read(output, 65536)
    except BlockingIOError:
        return True
    log.write(data)
    return bool(data)


def drain(output: int, log: RotatingLog) -> None:
    try:
        while data := os.read(output, 65536):
            log.write(data)
    except BlockingIOError:
        pass


def kill_leftovers(child: int) -> None:
    """Kill all other processes, as the kernel does when a container's first process ends."""
    send_kill(os.killpg, child)
    while has_children():  # with orphans adopted, every remaining process descends from a child of this process
        for pid in descendants(os.getpid()):
            send_kill(os.kill, pid)
        time.sleep(0.01)


def has_children() -> bool:
    """Whether a child still runs, after collecting the ended children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def send_kill(kill: Callable[[int, int], None], pid: int) -> None:
    try:
        kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def descendants(parent: int) -> list[int]:
    """Pids of every process below `parent`, from /proc; empty without /proc, where the group kill must suffice."""
    children = children_by_parent() if HAS_PROC else {}
    pids, frontier = [], [parent]
    while frontier:
        below = children.get(frontier.pop(), [])
        pids += below
        frontier += below
    return pids


def takes_signal(pid: int, number: int) -> bool:
    """Whether the kernel gives a signal to this process if it is the first process of a container.

    The kernel discards a signal that would end the first process of a PID namespace, unless the process has a handler
    for it (or blocks it, until later): https://man7.org/linux/man-pages/man7/pid_namespaces.7.html. Here, the first
    process is an ordinary process, which the signal would end. Without /proc nobody knows, and the answer is True.
    """
    if not HAS_PROC:
        return True
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            masks = dict(line.split(b":", 1) for line in status if line.startswith(b"Sig"))
    except OSError:  # the process has ended
        return False
    return any(int(masks[name], 16) >> (number - 1) & 1 for name in (b"SigCgt", b"SigBlk"))


def children_by_parent() -> dict[int, list[int]]:
    """The pids of all processes of this machine by their parent's pid, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
    return children


def reserve_exit(directory: str) -> int:
    """Allocate the exit file's disk space in advance: a full disk must not turn a success into a loss."""
    descriptor = os.open(os.path.join(directory, "exit.tmp"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    os.write(descriptor, b" " * EXIT_BYTES)
    return descriptor


def write_exit(directory: str, descriptor: int, code: int) -> None:
    os.pwrite(descriptor, f"{code} {time.time():.6f}".ljust(EXIT_BYTES).encode(), 0)
    path = os.path.join(directory, "exit")
    os.rename(f"{path}.tmp", path)


class RotatingLog:
    """Appends to a file; at half of the limit, the file becomes FILE.1 and replaces the previous FILE.1."""

    def __init__(self, path: str, log_bytes: int) -> None:
        self.path = path
        self.times = path.removesuffix(LOG) + TIMES
        self.marked = 0.0
        self.half = log_bytes // 2
        self.descriptor = self.open()

    def open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), self.half):
                self.append(data[start : start + self.half])
        except OSError:
            return  # a full disk costs log lines, not the training

    def append(self, data: bytes) -> None:
        size = os.fstat(self.descriptor).st_size
        if size and size + len(data) > self.half:
            os.rename(self.path, f"{self.path}.1")
            os.close(self.descriptor)
            self.descriptor = self.open()
            self.rotate_times()
            size = 0
        self.mark(size)
        os.write(self.descriptor, data)

    def mark(self, size: int) -> None:
        """Record when the log had this size, so that readers can start at a time."""
        if time.time() - self.marked >= MARK_SECONDS:
            self.marked = time.time()
            with open(self.times, "a") as file:
                file.write(f"{self.marked:.3f} {size}\n")

    def rotate_times(self) -> None:
        self.marked = 0.0
        if os.path.exists(self.times):
            os.rename(self.times, f"{self.times}.1")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
    else:
        sys.exit(main(*sys.argv[1:]))
