"""The workspace agent sees all of its folder and nothing else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import workspace
from examples.workspace import MAX_CHARS, MAX_ENTRIES, agent, list_files, read_file
from runner import Context, Tool, ToolError
from runner.tools import execute

SECRET = "the secret outside"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with a bit of everything, and a secret beside it."""
    root = tmp_path / "inside"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text("\n# Title\n\nFirst paragraph.\n", "utf-8")
    (root / "docs" / "guide.txt").write_text("a guide", "utf-8")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text(SECRET, "utf-8")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET, "utf-8")
    # A sibling whose name begins like the workspace's: a comparison of prefixes would let it in.
    (tmp_path / "inside-too").mkdir()
    (tmp_path / "inside-too" / "secret.txt").write_text(SECRET, "utf-8")
    monkeypatch.setenv("WORKSPACE", str(root))
    return root


def link(path: Path, target: str | Path) -> None:
    path.symlink_to(target)


ESCAPES = {
    "parent": ("../outside/secret.txt", "PERMISSION_DENIED"),
    "sibling with the same prefix": ("../inside-too/secret.txt", "PERMISSION_DENIED"),
    "parent after a folder": ("docs/../../outside/secret.txt", "PERMISSION_DENIED"),
    "parent after nothing": ("missing/../../outside/secret.txt", "PERMISSION_DENIED"),
    "out and in again": ("../inside/README.md", "PERMISSION_DENIED"),
    "bare parent": ("..", "PERMISSION_DENIED"),
    "absolute": ("/etc/passwd", "PERMISSION_DENIED"),
    "absolute, two slashes": ("//etc/passwd", "PERMISSION_DENIED"),
    "root": ("/", "PERMISSION_DENIED"),
    "link to a file": ("to-file", "PERMISSION_DENIED"),
    "link to a folder": ("to-folder/secret.txt", "PERMISSION_DENIED"),
    "relative link": ("to-parent/outside/secret.txt", "PERMISSION_DENIED"),
    "link to a link": ("to-link", "PERMISSION_DENIED"),
    "link to the root of the process": ("to-proc/etc/passwd", "PERMISSION_DENIED"),
    "link in a circle": ("circle", "INVALID_ARGUMENT"),
    "below a link in a circle": ("circle/secret.txt", "INVALID_ARGUMENT"),
    "dangling link": ("dangling", "NOT_FOUND"),
    "NUL": ("README.md\0.txt", "INVALID_ARGUMENT"),
    "lone surrogate": ("\ud800", "INVALID_ARGUMENT"),
    "backslashes": ("..\\outside\\secret.txt", "NOT_FOUND"),
    "home": ("~/secret.txt", "NOT_FOUND"),
    "percent": ("%2e%2e/outside/secret.txt", "NOT_FOUND"),
    "long name": ("x" * 300, "NOT_FOUND"),
    "long path": ("x/" * 5_000, "INVALID_ARGUMENT"),
    "missing": ("missing.txt", "NOT_FOUND"),
    "below a file": ("README.md/secret.txt", "INVALID_ARGUMENT"),
    "git": (".git/config", "PERMISSION_DENIED"),
    "git itself": (".git", "PERMISSION_DENIED"),
    "git in capitals": (".GIT/config", "PERMISSION_DENIED"),
    "git in both cases": ("docs/../.Git/config", "PERMISSION_DENIED"),
    "git by a dot": ("./.git/config", "PERMISSION_DENIED"),
    "git by a link": ("to-git", "PERMISSION_DENIED"),
    "git by a linked folder": ("to-git-folder/config", "PERMISSION_DENIED"),
}


@pytest.fixture
def links(root: Path) -> Path:
    """Every kind of link that a workspace may hold."""
    link(root / "to-file", root.parent / "outside" / "secret.txt")
    link(root / "to-folder", root.parent / "outside")
    link(root / "to-parent", "..")
    link(root / "to-link", "to-file")
    link(root / "to-proc", "/proc/self/root")
    link(root / "circle", "circle")
    link(root / "dangling", "nothing")
    link(root / "to-git", ".git/config")
    link(root / "to-git-folder", ".git")
    link(root / "to-readme", "README.md")
    link(root / "to-docs", root / "docs")
    return root


@pytest.mark.parametrize(("path", "type"), ESCAPES.values(), ids=ESCAPES)
@pytest.mark.parametrize("function", [read_file, list_files], ids=lambda each: str(each.name))
def test_no_path_leads_out_or_to_what_is_hidden(
    links: Path, function: Tool, path: str, type: str
) -> None:
    with pytest.raises(ToolError) as caught:
        function(path)

    assert caught.value.type == type
    assert SECRET not in str(caught.value)
    assert str(links.parent) not in str(caught.value)


def test_a_link_that_stays_inside_is_followed(links: Path) -> None:
    assert "First paragraph." in read_file("to-readme").value.content


def test_a_linked_folder_inside_is_listed_under_its_real_name(links: Path) -> None:
    listing = list_files("to-docs")

    assert [each.path for each in listing.entries] == ["docs/guide.txt"]
    assert listing.path == "docs/"


def test_a_link_put_in_place_of_a_folder_meanwhile_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve_then_swap(base: Path, path: str) -> tuple[str, ...]:
        (root / "docs").rename(root / "moved")
        link(root / "docs", root.parent / "outside")
        return ("docs", "secret.txt")

    monkeypatch.setattr(workspace, "_resolve", resolve_then_swap)

    with pytest.raises(ToolError):
        read_file("docs/secret.txt")


def test_another_spelling_of_git_that_the_file_system_takes_is_hidden_too(root: Path) -> None:
    # A hard link is the one way to have a second name for the same file on this file system.
    (root / "tree").mkdir()
    (root / "tree" / ".git").write_text("gitdir: elsewhere", "utf-8")
    os.link(root / "tree" / ".git", root / "tree" / "git~1")

    assert list_files("tree").entries == []
    with pytest.raises(ToolError, match=r"\.git is hidden"):
        read_file("tree/git~1")


def test_a_listing_shows_folders_files_links_and_sizes_but_no_git(links: Path) -> None:
    listing = list_files()

    shown = {each.path: (each.kind, each.size) for each in listing.entries}
    assert shown["docs/"] == ("folder", None)
    assert shown["README.md"] == ("file", 27)
    assert shown["to-file"] == ("link", None)
    assert ".git/" not in shown
    assert listing.total == len(shown)
    assert list(shown) == sorted(shown)


def test_only_git_is_hidden_and_not_what_is_named_alike(root: Path) -> None:
    (root / ".gitignore").write_text("*.pyc", "utf-8")

    assert ".gitignore" in [each.path for each in list_files().entries]
    assert read_file(".gitignore").value.content == "*.pyc"


@pytest.mark.parametrize("path", ["docs", "docs/", "./docs", "docs//", "docs/."])
def test_entries_of_a_folder_have_paths_that_can_be_read(root: Path, path: str) -> None:
    (entry,) = list_files(path).entries

    assert read_file(entry.path).value.content == "a guide"


def test_a_long_listing_is_cut_and_says_so(root: Path) -> None:
    (root / "many").mkdir()
    for number in range(MAX_ENTRIES + 1):
        (root / "many" / f"{number:04}").touch()

    listing = list_files("many")

    assert len(listing.entries) == MAX_ENTRIES
    assert listing.total == MAX_ENTRIES + 1
    assert listing.note == "... [cut: 500 of 501 entries listed]"


def test_a_full_listing_of_exactly_the_cap_is_not_marked(root: Path) -> None:
    (root / "many").mkdir()
    for number in range(MAX_ENTRIES):
        (root / "many" / f"{number:04}").touch()

    assert list_files("many").note is None


@pytest.mark.parametrize("letter", ["x", "é", "漢", "🥬"])
@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
def test_a_long_file_is_cut_at_characters_and_says_how_long_it_is(
    root: Path, letter: str, start: str
) -> None:
    (root / "long.txt").write_text(start + letter * (MAX_CHARS + 1), "utf-8")
    size = (root / "long.txt").stat().st_size

    text = read_file("long.txt").value

    marker = f"\n... [cut: the first 16000 characters of a file of {size} bytes]"
    assert text.content == letter * MAX_CHARS + marker
    assert text.truncated
    assert text.size == size


def test_a_file_of_exactly_the_cap_is_whole(root: Path) -> None:
    (root / "long.txt").write_text("é" * MAX_CHARS, "utf-8")

    text = read_file("long.txt").value

    assert text.content == "é" * MAX_CHARS
    assert not text.truncated


def test_a_huge_file_is_not_read_whole(root: Path) -> None:
    with (root / "huge.txt").open("wb") as file:
        file.write(b"x" * 100_000)
        file.truncate(10**12)  # sparse: it takes no room on the disk

    assert read_file("huge.txt").value.size == 10**12


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n\0\0", b"caf\xe9", b"\xff\xfea\0", b"cut \xe6\xbc"]
)
def test_what_is_not_utf8_text_is_refused_with_its_size(root: Path, content: bytes) -> None:
    (root / "data.bin").write_bytes(content)

    with pytest.raises(ToolError, match=rf"data.bin isn't UTF-8 text \({len(content)} bytes\)"):
        read_file("data.bin")


@pytest.mark.timeout(10)
def test_a_fifo_is_refused_and_does_not_hang(root: Path) -> None:
    os.mkfifo(root / "pipe")

    with pytest.raises(ToolError, match="isn't a regular file"):
        read_file("pipe")
    with pytest.raises(ToolError, match="isn't a folder"):
        list_files("pipe")
    assert {each.path: each.kind for each in list_files().entries}["pipe"] == "other"


def test_a_folder_is_not_read_and_a_file_is_not_listed(root: Path) -> None:
    with pytest.raises(ToolError, match="docs is a folder"):
        read_file("docs")
    with pytest.raises(ToolError, match="is a folder"):
        read_file(".")
    with pytest.raises(ToolError, match=r"README\.md isn't a folder"):
        list_files("README.md")


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Root may read everything, so root isn't who tests what may not be read."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_may_not_be_read_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, ordinary_user: None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "README.md").write_text("secret")
        (Path(folder) / "README.md").chmod(0)
        monkeypatch.setenv("WORKSPACE", folder)

        with pytest.raises(ToolError, match="may not be read") as caught:
            read_file("README.md")
    assert caught.value.type == "PERMISSION_DENIED"


def test_a_name_that_is_not_text_is_listed_all_the_same(root: Path) -> None:
    try:
        (root / "docs" / os.fsdecode(b"caf\xe9.txt")).touch()
    except OSError:
        pytest.skip("this file system takes only names that are text")

    assert [each.path for each in list_files("docs").entries] == [
        "docs/caf\ufffd.txt",
        "docs/guide.txt",
    ]


def test_the_evidence_is_the_first_line_that_says_something(root: Path) -> None:
    (evidence,) = read_file("./README.md").evidence

    assert (evidence.source, evidence.text) == ("README.md", "# Title")


def test_an_empty_file_is_read_as_empty(root: Path) -> None:
    (root / "empty").touch()

    result = read_file("empty")

    assert (result.value.content, result.evidence[0].text) == ("", "")


def test_the_workspace_is_the_current_folder_unless_set(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORKSPACE")
    monkeypatch.chdir(root / "docs")

    assert [each.path for each in list_files().entries] == ["guide.txt"]


def test_the_workspace_may_itself_be_behind_a_link(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link(root.parent / "alias", root)
    monkeypatch.setenv("WORKSPACE", str(root.parent / "alias"))

    assert "First paragraph." in read_file("README.md").value.content


@pytest.mark.parametrize("name", ["missing", "README.md"])
def test_a_workspace_that_is_no_folder_is_named_without_its_path(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("WORKSPACE", str(root / name))

    with pytest.raises(ToolError, match="set WORKSPACE to a folder") as caught:
        list_files()
    assert str(root) not in str(caught.value)


def test_no_descriptor_is_left_open(links: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("this system doesn't list open descriptors")
    before = len(list(descriptors.iterdir()))

    for path, _ in ESCAPES.values():
        with pytest.raises(ToolError):
            read_file(path)
    read_file("docs/guide.txt")
    list_files("docs")

    assert len(list(descriptors.iterdir())) == before


def test_as_tools_of_the_agent_both_may_be_run_again_and_answer_in_json(root: Path) -> None:
    assert agent.toolbox.names == ("list_files", "read_file")
    assert all(each.idempotent for each in agent.toolbox)

    result = execute(read_file, Context(call_id="0.0"), '{"path": "docs/guide.txt"}').result

    assert json.loads(result.content)["content"] == "a guide"
    assert [(each.source, each.call_id) for each in result.evidence] == [("docs/guide.txt", "0.0")]
