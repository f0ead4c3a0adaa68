"""Turns the template into a package of your own: make rename NAME=acme_lm

One name in four spellings is replaced in every text file that git tracks, and in file names: the package (also the
command and the config targets), the prefix of its environment variables, the distribution in pyproject.toml, and the
title, which is mkdocs.yml's site_name. A line that says `NAME=` or `name stays` is left as it is, and so is LICENSE.
Needs nothing but Python and git. Everything is worked out before the first file is written.
"""

import contextlib
import importlib.util
import keyword
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

KEPT_FILES = ("LICENSE",)
KEPT_LINE = re.compile(r"NAME=|name stays")
Rules = list[tuple[re.Pattern[str], str]]


class Refused(Exception):
    """Why nothing was renamed."""


def git(root: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise Refused("not a git checkout, which says what the project's files are: git init && git add .") from None


def current_names(root: Path) -> tuple[str, str]:
    """(package, title) that the project has now."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    (folder,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    title = re.search(r"^site_name: (.+)$", (root / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    if title is None:
        raise Refused("mkdocs.yml has no site_name, which holds the title")
    return Path(folder).name, title[1].strip()


def title_of(name: str) -> str:
    """NAME=acme_lm -> Acme LM."""
    return " ".join(part.upper() if len(part) < 4 else part.capitalize() for part in name.split("_"))


def rules(old: str, old_title: str, new: str, new_title: str) -> Rules:
    def word(text: str, after: str = r"(?![A-Za-z0-9_])") -> re.Pattern[str]:
        return re.compile(rf"(?<![A-Za-z0-9_]){re.escape(text)}{after}")

    return [
        (re.compile(rf'(?<=^name = "){re.escape(distribution(old))}(?="$)'), distribution(new)),
        (word(distribution(old), r"(?=\[[a-z,]+\])"), distribution(new)),
        (word(old), new),
        (word(f"{old.upper()}_", ""), f"{new.upper()}_"),
        (word(old_title, r"(?![A-Za-z0-9])"), new_title),
    ]


def distribution(name: str) -> str:
    return name.replace("_", "-")


def renamed(text: str, replacing: Rules) -> str:
    def line(text: str) -> str:
        if KEPT_LINE.search(text):
            return text
        for pattern, new in replacing:
            text = pattern.sub(new.replace("\\", r"\\"), text)
        return text

    return "\n".join(map(line, text.split("\n")))


def texts(root: Path) -> dict[str, str]:
    """Path and content of every tracked text file; links and binary files are left out."""
    found = {}
    for name in git(root, "ls-files", "-z").rstrip("\0").split("\0"):
        path = root / name
        if name not in KEPT_FILES and path.is_file() and not path.is_symlink():
            with contextlib.suppress(UnicodeDecodeError):
                found[name] = path.read_bytes().decode("utf-8")
    return {name: text for name, text in found.items() if "\0" not in text}


def check_name(root: Path, name: str, old: str, files: dict[str, str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise Refused("not a package name; allowed: lower-case words of letters and digits joined by '_', no keyword")
    if name == old:
        raise Refused("this is the present name")
    installed = [*root.glob(f".venv/lib/python*/site-packages/{name}"), importlib.util.find_spec(name)]
    if name in sys.stdlib_module_names or any(installed):
        raise Refused("there is a module of this name already, which it would hide")
    taken = re.compile(rf"(?<![A-Za-z0-9_])({name}(?![A-Za-z0-9_])|{name.upper()}_|{distribution(name)}(?![\w-]))")
    for file, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            if taken.search(line) and not KEPT_LINE.search(line):
                raise Refused(f"already means something else here ({file}:{number}); choose a name of its own")


def write(root: Path, old: dict[str, str], new: dict[str, tuple[str, str]]) -> None:
    """Writes `new` (old path -> new path and text); puts everything back when something fails on the way."""
    try:
        for name, (target, text) in new.items():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            (root / name).rename(root / target)
            (root / target).write_bytes(text.encode("utf-8"))
    except OSError:
        for name, (target, _) in new.items():
            if not (root / name).exists():
                (root / target).rename(root / name)
            (root / name).write_bytes(old[name].encode("utf-8"))
        raise
    emptied = {parent for name in new for parent in (root / name).parents if parent != root and root in parent.parents}
    for folder in sorted(emptied, reverse=True):
        if all(item.name == "__pycache__" for item in folder.iterdir()):
            shutil.rmtree(folder)


def rename(root: Path, name: str, title: str, force: bool) -> str:
    old, old_title = current_names(root)
    files = texts(root)
    check_name(root, name, old, files)
    if git(root, "status", "--porcelain").strip() and not force:
        raise Refused("the working tree has changes; commit them first, or FORCE=1")
    replacing = rules(old, old_title, name, title)
    new = {file: (renamed(file, replacing), renamed(text, replacing)) for file, text in files.items()}
    new = {file: change for file, change in new.items() if change != (file, files[file])}
    for file, (target, _) in new.items():
        if target != file and (root / target).exists():
            raise Refused(f"{target} exists already")
    write(root, files, new)
    return f"{old} is now {name} ({title}): {len(new)} files. Next: make clean format test; git add -A && git commit"


def main() -> None:
    name, title, *force = sys.argv[1:]
    try:
        print(rename(Path(__file__).resolve().parents[1], name, title or title_of(name), force == ["--force"]))
    except Refused as why:
        print(f"make rename NAME={name}: {why}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
