"""Run a command as on a machine without some features of Linux: `python hide.py FEATURE[,FEATURE...] COMMAND...`.

The kernel hides the features from the command and from all of its descendants, in namespaces of mounts and of the
network and by a filter of system calls. Only ENVIRON is a patch of a library (site/sitecustomize.py). psutil, which
needs no /proc on macOS, finds the real /proc elsewhere.
Needs root, or a kernel that lets a user make namespaces. The directory of `HIDDEN` must exist, and is the command's
alone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

PROC, CGROUPS, SYSCALLS, LOOPBACK, TOOLS, ENVIRON = "proc", "cgroups", "syscalls", "loopback", "tools", "environ"
FEATURES = (PROC, CGROUPS, SYSCALLS, LOOPBACK, TOOLS, ENVIRON)

DIRECTORY = "HIDDEN"  # the variable that names a directory for mounts
PROCFS = "HIDDEN_PROCFS"  # the variable that tells site/sitecustomize.py where psutil finds /proc
NO_ENVIRON = "HIDDEN_ENVIRON"  # the variable that makes site/sitecustomize.py hide environments
REFUSED = "refused.log"  # in the directory: each use of a program that macOS does not have
NAMESPACE = "namespace"  # in the directory: the number of the network's namespace, which every descendant has

# System calls that macOS does not have: prctl, sched_getaffinity, memfd_create, pidfd_open and pidfd_send_signal.
LINUX_CALLS = {"x86_64": (157, 204, 319, 434, 424), "aarch64": (167, 123, 279, 434, 424)}
SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER = 1
# Programs of GNU and util-linux that macOS does not have.
ABSENT = (
    "setsid", "timeout", "flock", "ip", "ss", "nproc", "tac", "shuf", "sha256sum", "md5sum", "getent", "free", "pidof",
    "numfmt", "taskset", "ionice", "nsenter", "prlimit", "systemctl", "start-stop-daemon", "findmnt", "ldconfig",
)  # fmt: skip
# Programs that macOS has without GNU's long options, and the short options that only GNU's have.
DIFFERENT = {
    "stat": "-c", "sed": "-i", "date": "-d", "ps": "f", "grep": "-P", "base64": "-w", "cp": "-u", "ln": "-r",
    "ls": "-Z", "mv": "-t", "mktemp": "-p", "tail": "-s", "xargs": "-d", "cat": "-A", "rm": "-z",
    "mkdir": "-Z", "chmod": "-c", "readlink": "-e", "sort": "-h", "head": "-z", "expand": "-z",
}  # fmt: skip
WRAPPER = """#!/bin/sh
for word; do
    case $word in
    --?*|{option}) echo "{name} $*" >> {log}; exit 64 ;;
    esac
done
exec {real} "$@"
"""
MISSING = '#!/bin/sh\necho "{name} $*" >> {log}\nexit 127\n'


def main(features: str, *command: str) -> None:
    hidden, directory = set(features.split(",")), Path(os.environ[DIRECTORY])
    if unknown := hidden - set(FEATURES):
        sys.exit(f"unknown features {sorted(unknown)}; expected some of {FEATURES}")
    (directory / NAMESPACE).write_text(str(os.stat("/proc/self/ns/net").st_ino))
    if PROC in hidden:
        hide_proc(directory / "proc")
    if CGROUPS in hidden:
        mount("-t", "tmpfs", "none", "/sys")
    # macOS answers on 127.0.0.1 alone, Linux on all of 127.0.0.0/8.
    start_loopback("255.255.255.255" if LOOPBACK in hidden else "255.0.0.0")
    if TOOLS in hidden:
        hide_tools(directory)
    if ENVIRON in hidden:
        os.environ[NO_ENVIRON] = "1"
    if SYSCALLS in hidden:
        refuse_calls(LINUX_CALLS[platform.machine()])
    path = [str(Path(__file__).parent / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.execvp(command[0], command)


def namespaces() -> list[str]:
    """The command that gives hide.py namespaces of its own."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *as_root, "--mount", "--net"]


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def hide_proc(elsewhere: Path) -> None:
    elsewhere.mkdir()
    mount("--rbind", "/proc", str(elsewhere))
    mount("-t", "tmpfs", "none", "/proc")
    os.environ[PROCFS] = str(elsewhere)


def start_loopback(mask: str) -> None:
    """Start the namespace's loopback interface with the addresses of 127.0.0.1 and a mask."""
    set_flags, set_netmask, up_loopback_running = 0x8914, 0x891C, 0x49  # <linux/sockios.h>, <linux/if.h>
    with socket.socket() as control:
        fcntl.ioctl(control, set_flags, struct.pack("16sH14x", b"lo", up_loopback_running))
        netmask = struct.pack("16sH2x4s8x", b"lo", socket.AF_INET, socket.inet_aton(mask))
        fcntl.ioctl(control, set_netmask, netmask)


def hide_tools(directory: Path) -> None:
    log = directory / REFUSED
    for name in (*ABSENT, *DIFFERENT):
        if (place := shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")) is None:
            continue
        real, wrapper = directory / f"real-{name}", directory / name
        real.touch()
        mount("--bind", place, str(real))
        text = MISSING if name in ABSENT else WRAPPER
        wrapper.write_text(text.format(name=name, log=log, real=real, option=DIFFERENT.get(name)))
        wrapper.chmod(0o755)
    for name in (*ABSENT, *DIFFERENT):  # after the last use of a program
        if (directory / name).exists():
            place = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
            mount("--bind", str(directory / name), str(place))


def refuse_calls(numbers: tuple[int, ...]) -> None:
    """Let the kernel answer ENOSYS to these system calls: https://docs.kernel.org/userspace-api/seccomp_filter.html."""
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.ENOSYS  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
    steps = [(load, 0, 0, 0)]
    steps += [(equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    steps += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(SECCOMP_CALL[platform.machine()], SECCOMP_SET_MODE_FILTER, 0, program):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


if __name__ == "__main__":
    main(*sys.argv[1:])
