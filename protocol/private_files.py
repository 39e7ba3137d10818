"""Folders and files of this user alone, in places where others may put files and links."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_CAREFUL = sum(
    getattr(os, name, 0)  # Windows has the last alone
    for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
)


def make_private_folder(folder: Path) -> None:
    """With mode 0700, unless it is there.
    Raises OSError: it cannot be made, is a link or a file, or belongs to another user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _CAREFUL)
    try:
        if stat.S_IMODE(_checked(descriptor, folder).st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def create_private_file(path: Path) -> BinaryIO:
    """With mode 0600, in a private folder. What is there, left by a process that died, goes."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFUL
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def open_own_file(path: Path, *, writes: bool = False) -> BinaryIO:
    """Raises OSError: it is not there, a link, no file, or another user's."""
    descriptor = os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | _CAREFUL)
    file = os.fdopen(descriptor, "r+b" if writes else "rb")
    try:
        if not stat.S_ISREG(_checked(descriptor, path).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
    except BaseException:
        file.close()
        raise
    return file


def overwrite_private_file(path: Path) -> BinaryIO:
    """What the user has named, emptied, with mode 0600. Devices and pipes stay as they are.
    Raises OSError: it cannot be written, belongs to another user, or is a link of one."""
    is_own_link = path.is_symlink() and foreign_owner(path, follows=False) is None
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if is_own_link else os.O_NOFOLLOW)
    file = os.fdopen(os.open(path, flags, 0o600), "wb")
    try:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _checked(file.fileno(), path)
            os.fchmod(file.fileno(), 0o600)
            os.ftruncate(file.fileno(), 0)
    except BaseException:
        file.close()
        raise
    return file


def foreign_owner(path: Path, *, follows: bool = True) -> int | None:
    """The user whose it is, unless that is this user, or root, who can do anything. Raises OSError:
    it is not there."""
    owner = path.stat(follow_symlinks=follows).st_uid
    return None if owner in (os.getuid(), 0) else owner


def _checked(descriptor: int, path: Path) -> os.stat_result:
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid():
        why = f"it belongs to another user ({status.st_uid})"
        raise PermissionError(errno.EPERM, why, str(path))
    return status
