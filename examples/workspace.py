"""An agent that looks around one folder: `WORKSPACE`, or the current one.

The rule: no path that a model writes leads out of the folder or into `.git`, and no message to it
names where the folder is on this machine.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from runner import Agent, Evidence, Limits, Result, SettingsError, ToolError, tool

MAX_ENTRIES = 500
MAX_CHARS = 16_000
MAX_BYTES = 4 * (MAX_CHARS + 2)  # at most 4 a character; a mark at the start, and one to see more
MAX_PATH_CHARS = 4_096
MAX_EXCERPT_CHARS = 200

Kind = Literal["file", "folder", "link", "other"]


class Entry(BaseModel):
    """`path` is relative to the workspace, a folder's ends with "/"; `size` is a file's bytes."""

    path: str
    kind: Kind
    size: int | None = None


class Listing(BaseModel):
    """What is in a folder. `total` counts all of it; `note` says so where not all is listed."""

    path: str
    entries: list[Entry]
    total: int
    note: str | None = None


class FileText(BaseModel):
    """A text file. `size` is in bytes; where `truncated`, `content` ends with a marker."""

    path: str
    content: str
    size: int
    truncated: bool = False


@tool(timeout=10, idempotent=True)
def list_files(path: str = ".") -> Listing:
    """List the files and folders directly inside a folder of the workspace, with their sizes.

    :param path: the folder, relative to the workspace, such as docs; "." is the workspace itself
    """
    with _name_errors(path), _open_inside(path, os.O_DIRECTORY) as (folder, place):
        with os.scandir(folder) as found:
            names = sorted(each.name for each in found if not _is_git(each.name, folder))
        entries = [_describe_entry(name, folder, place) for name in names[:MAX_ENTRIES]]
    note = None
    if len(names) > MAX_ENTRIES:
        note = f"... [cut: {MAX_ENTRIES} of {len(names)} entries listed]"
    shown = _show("/".join((*place, ""))) or "."
    return Listing(path=shown, entries=entries, total=len(names), note=note)


@tool(timeout=10, idempotent=True)
def read_file(path: str) -> Result[FileText]:
    """Read a text file of the workspace. Of a long one only the beginning is returned.

    :param path: the file, relative to the workspace, such as README.md
    """
    # Without O_NONBLOCK, to open a fifo that nobody writes to would hang.
    with _name_errors(path), _open_inside(path, os.O_NONBLOCK) as (file, place):
        size = os.fstat(file).st_size
        raw = _read_at_most(file, MAX_BYTES)
    name = _show("/".join(place))
    text = _decode(raw, name, size)
    truncated = len(text) > MAX_CHARS
    if truncated:
        text = text[:MAX_CHARS]
    excerpt = next((line.strip() for line in text.splitlines() if line.strip()), "")
    evidence = Evidence(source=name, text=excerpt[:MAX_EXCERPT_CHARS])
    if truncated:
        text += f"\n... [cut: the first {MAX_CHARS} characters of a file of {size} bytes]"
    return Result(FileText(path=name, content=text, size=size, truncated=truncated), [evidence])


workspace = Path(os.environ.get("WORKSPACE") or ".")
if not (os.access(workspace, os.R_OK | os.X_OK) and workspace.is_dir()):
    # Here, so that neither a worker nor a run starts: its model would only see nothing.
    raise SettingsError(f"WORKSPACE: {workspace} isn't a folder that can be read; set it to one")

agent = Agent(
    name="workspace",
    instructions=(
        "You answer questions about the files of one folder. List the folder first, read what you"
        " need, several files in one turn, and answer only from what you read. Say which files you"
        " read, and say so where something could not be read."
    ),
    tools=[list_files, read_file],
    limits=Limits(max_steps=8, timeout=120),
)


# --- the way in --------------------------------------------------------------------------------


@contextmanager
def _open_inside(path: str, flags: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """A descriptor of what `path` names, and its real place as parts relative to the workspace.

    Links are resolved first, then each part of the outcome is opened from its parent without
    following any: a link that is put there in between leads nowhere.
    """
    root = Path(os.environ.get("WORKSPACE") or ".").resolve()
    place = _resolve(root, path)
    # "." opens the root once more, so that it is checked like any other place.
    *above, last = place or (".",)
    with ExitStack() as opened:
        here = _open_root(root)
        opened.callback(os.close, here)
        for name in above:
            here = _open_child(here, name, os.O_DIRECTORY)
            opened.callback(os.close, here)
        here = _open_child(here, last, flags)
        opened.callback(os.close, here)
        yield here, place


def _open_root(root: Path) -> int:
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        raise ToolError(
            "the workspace can't be opened: set WORKSPACE to a folder", type="NOT_FOUND"
        ) from None


def _open_child(parent: int, name: str, flags: int) -> int:
    if _is_git(name, parent):
        raise _denied(".git is hidden")
    _check_kind(name, parent, folder=bool(flags & os.O_DIRECTORY))
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=parent)


def _resolve(root: Path, path: str) -> tuple[str, ...]:
    if "\0" in path:
        raise _invalid("a path can't contain NUL")
    if len(path) > MAX_PATH_CHARS:
        raise _invalid(f"a path has at most {MAX_PATH_CHARS} characters")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise _invalid("the path isn't valid text") from None
    if path.startswith("/"):
        raise _denied("give a path relative to the workspace, such as README.md")
    # Also where it would come back in: that tells what the folders outside are called.
    if ".." in path.split("/"):
        raise _denied("'..' can't be used: paths are relative to the workspace")
    real = Path(os.path.realpath(root / path))
    if not real.is_relative_to(root):
        raise _denied("it is a link that leads out of the workspace")
    return real.relative_to(root).parts


def _is_git(name: str, folder: int) -> bool:
    """Whether `name` in `folder` is `.git`, in whatever spelling this file system takes for it."""
    if name.casefold() == ".git":
        return True
    try:
        git = os.stat(".git", dir_fd=folder, follow_symlinks=False)
        mine = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(git, mine)


def _check_kind(name: str, parent: int, *, folder: bool) -> None:
    """Comes before the opening, since merely to open a device may do something."""
    mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    shown = _show(name)
    if folder and not stat.S_ISDIR(mode):
        raise _invalid(f"{shown} isn't a folder")
    if not folder and stat.S_ISDIR(mode):
        raise _invalid(f"{shown} is a folder; list_files shows what is in it")
    if not folder and not stat.S_ISREG(mode):
        raise _invalid(f"{shown} isn't a regular file")


@contextmanager
def _name_errors(path: str) -> Iterator[None]:
    """The system's errors in words of ours: its own hold the path on this machine."""
    try:
        yield
    except OSError as error:
        shown = _show(path[:MAX_EXCERPT_CHARS])
        match error.errno:
            case errno.ENOENT | errno.ENOTDIR | errno.ENAMETOOLONG:
                raise ToolError(f"there is no {shown} in the workspace", type="NOT_FOUND") from None
            case errno.ELOOP:
                raise _denied(f"{shown} is a link that leads nowhere") from None
            case errno.EACCES | errno.EPERM:
                raise _denied(f"{shown} may not be read") from None
        raise ToolError(f"{shown} can't be read", retryable=True) from None


def _denied(message: str) -> ToolError:
    return ToolError(message, type="PERMISSION_DENIED")


def _invalid(message: str) -> ToolError:
    return ToolError(message, type="INVALID_ARGUMENT", fields={"path": message})


# --- what is there -----------------------------------------------------------------------------


def _describe_entry(name: str, folder: int, place: tuple[str, ...]) -> Entry:
    path = _show("/".join((*place, name)))
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:  # it went away since it was listed
        return Entry(path=path, kind="other")
    if stat.S_ISDIR(status.st_mode):
        return Entry(path=f"{path}/", kind="folder")
    if stat.S_ISREG(status.st_mode):
        return Entry(path=path, kind="file", size=status.st_size)
    return Entry(path=path, kind="link" if stat.S_ISLNK(status.st_mode) else "other")


def _show(path: str) -> str:
    """A name that isn't UTF-8 on disk has to be shown as text all the same."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _read_at_most(file: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (part := os.read(file, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _decode(raw: bytes, name: str, size: int) -> str:
    # Incremental, since the cut may fall inside a character; the end of a file may not.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        text = decoder.decode(raw, final=len(raw) < MAX_BYTES)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise _invalid(f"{name} isn't UTF-8 text ({size} bytes), so it can't be shown")
    return text
