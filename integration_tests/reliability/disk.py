"""Small disks: one whose power can be cut, so that what is not written out is lost, and one that becomes full."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

# What the kernel's fs/ext4 calls EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32).
_SHUTDOWN = 0x8004587D
# Names are written out, and bytes are not; neither is; all is, as by sync.
NAMES_KEPT, NOTHING_KEPT = 1, 2

_ioctl = fcntl.ioctl
_open = os.open


class NoDiskError(Exception):
    """File systems cannot be made or mounted here."""


class Disk:
    """An ext4 file system in a file, mounted within the block and never left behind.

    It is mounted without the guesses by which ext4 saves programs that rename without fsync: other file systems make
    none, and no standard asks for them.

    Args:
        folder: Where the image and the mount point are to be.
        nbytes: Of the image.
        commit: After how many seconds the system writes out what it holds.
    """

    def __init__(self, folder: Path, nbytes: int = 24 << 20, commit: int = 600) -> None:
        self.image = folder / "disk.img"
        self.top = folder / "disk"
        self._blank = folder / "prepared.img"
        self._options = f"loop,noauto_da_alloc,commit={commit}"
        self._mounted = False
        self.top.mkdir(parents=True, exist_ok=True)
        with self.image.open("wb") as file:
            file.truncate(nbytes)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(self.image))

    def __enter__(self) -> Disk:
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        self.unmount()

    def mount(self) -> None:
        _run("mount", "-t", "ext4", "-o", self._options, str(self.image), str(self.top))
        self._mounted = True

    def unmount(self) -> None:
        """Unmount it, and see that the loop device goes with that."""
        if not self._mounted:
            return
        for attempt in range(50):
            if subprocess.run(["umount", str(self.top)], capture_output=True).returncode == 0:
                break
            time.sleep(0.02 * attempt)
        else:
            _run("umount", "-l", str(self.top))
        self._mounted = False

    def remount(self) -> None:
        """As after a power loss: the file system recovers by its journal."""
        self.unmount()
        self.mount()

    def keep(self) -> None:
        """Remember what is on the disk now, for `restore`."""
        self.unmount()
        _copy(self.image, self._blank)
        self.mount()

    def restore(self) -> None:
        """Put the disk back as it was kept."""
        self.unmount()
        _copy(self._blank, self.image)
        self.mount()


class SmallDisk:
    """A file system in memory, mounted within the block, whose room can be changed."""

    def __init__(self, folder: Path) -> None:
        self.top = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> SmallDisk:
        _run("mount", "-t", "tmpfs", "tmpfs", str(self.top))
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "-l", str(self.top))

    def empty(self, **room: int) -> None:
        """Remove all that is on it, and give it much room."""
        for path in self.top.iterdir():
            shutil.rmtree(path)
        for kind, count in room.items():
            _run("mount", "-o", f"remount,{kind}={count}", str(self.top))

    def leave(self, kind: str, room: int) -> None:
        """Leave room beyond what is used: bytes of "size", or files, as "nr_inodes"."""
        status = os.statvfs(self.top)
        if kind == "size":
            used = (status.f_blocks - status.f_bfree) * status.f_frsize
        else:
            used = status.f_files - status.f_ffree
        _run("mount", "-o", f"remount,{kind}={used + room}", str(self.top))


def cut_power(top: str, flag: int) -> None:
    """Cut the power of the disk that `top` is on: from now on nothing reaches it."""
    fd = _open(top, os.O_RDONLY)
    _ioctl(fd, _SHUTDOWN, struct.pack("I", flag))


def _copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    subprocess.run(["cp", "--sparse=always", str(source), str(target)], check=True)


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        raise NoDiskError(f"there is no {command[0]}")
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise NoDiskError(f"{' '.join(command[:2])}: {ended.stderr.strip()}")
