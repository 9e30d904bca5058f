"""The programs of an image beside its own files: those of its base, and those that its Dockerfile installs.

Images are unpacked over this machine, which may have programs that the image lacks. Kubernetes' exec probes run a
program of the image, so the local stack searches only the directory that `link_programs` makes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

# The programs in /bin and /usr/bin of the packages that Debian 12 marks as essential, which every Debian image has
# (`dpkg-query -W -f '${Package} ${Essential}\n'` and `dpkg -L`, read on 2026-11-23), and mawk's, which is `required`.
# Images such as python:3.12 (without -slim) have more; what a Dockerfile needs of them, it should install.
_ESSENTIAL = """
    [ addpart arch awk b2sum base32 base64 basename basenc bash cat chcon chgrp chmod choom chown chrt cksum
    clear cmp comm cp csplit cut dash date dd delpart df diff diff3 dir dircolors dirname dmesg dnsdomainname
    domainname dpkg dpkg-deb dpkg-query du echo egrep env expand expr factor fallocate false fgrep find findmnt
    flock fmt fold getconf getent getopt grep groups gunzip gzip hardlink head hostid hostname i386 iconv id
    infocmp install ionice ipcmk ipcrm ipcs join last lastb ldd link linux32 linux64 ln locale localedef logger
    login logname ls lsblk lscpu lsipc lslocks lslogins lsmem lsns mawk mcookie md5sum mesg mkdir mkfifo mknod
    mktemp more mount mountpoint mv namei newgrp nice nisdomainname nl nohup nproc nsenter numfmt od partx paste
    pathchk perl pidof pinky pldd pr printenv printf prlimit ptx pwd rbash readlink realpath renice reset
    resizepart rev rgrep rm rmdir run-parts runcon script scriptlive scriptreplay sdiff sed seq setarch setpriv
    setsid setterm sg sh sha1sum sha224sum sha256sum sha384sum sha512sum shred shuf sleep sort split stat stdbuf
    stty su sum sync tabs tac tail tar taskset tee tempfile test tic timeout toe touch tput tr true truncate
    tset tsort tty tzselect uclampset umount uname uncompress unexpand uniq unlink unshare users vdir wall wc
    wdctl whereis which who whoami x86_64 xargs yes zcat zcmp zdiff zdump zegrep zfgrep zforce zgrep zless zmore
    znew
"""
ESSENTIAL = frozenset(_ESSENTIAL.split())
# Programs of packages that do not have the package's name.
OF_PACKAGE = {
    "procps": ("free", "kill", "pgrep", "pkill", "pmap", "ps", "top", "uptime", "vmstat", "watch"),
    "iproute2": ("ip", "ss"),
    "openssh-client": ("scp", "ssh"),
    "build-essential": ("cc", "g++", "gcc", "make"),
    "gcc": ("cc", "gcc"),
}


def apt_packages(command: str) -> set[str]:
    """The packages that a RUN instruction's command installs with apt."""
    packages: set[str] = set()
    for part in re.split(r"&&|\|\||[;|\n]", command):
        words = part.split()
        if {"apt", "apt-get"} & set(words) and "install" in words:
            given = words[words.index("install") + 1 :]
            packages |= {re.split(r"[=/:]", word)[0] for word in given if not word.startswith("-")}
    return packages


def programs_of(packages: Iterable[str]) -> frozenset[str]:
    """The programs of a Debian image with these packages. A package that OF_PACKAGE lacks has one of its own name."""
    return ESSENTIAL.union(*(OF_PACKAGE.get(package, (package,)) for package in packages))


def link_programs(directory: Path, programs: Iterable[str]) -> None:
    """Fill `directory` with links to this machine's programs of these names. A name that it lacks gets no link."""
    directory.mkdir(parents=True, exist_ok=True)
    for program in programs:
        here = shutil.which(program)
        if here is not None and not (directory / program).is_symlink():
            (directory / program).symlink_to(here)
