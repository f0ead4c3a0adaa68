"""Turns the template into a package of your own: make rename NAME=acme_lm

One name in four spellings is replaced in every text file that git tracks, and in file names: the package (also the
command and the config targets), the prefix of its environment variables, the distribution in pyproject.toml, and the
title, which is mkdocs.yml's site_name. A line that says `NAME=` or `name stays` is left as it is, and so is LICENSE.
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
    site = (root / "mkdocs.yml").read_text(encoding="utf-8")
    if not (title := re.search(r"^site_name: (.+)$", site, flags=re.MULTILINE)):
        raise Refused("mkdocs.yml has no site_name, which holds the title")
    return Path(folder).name, title[1].strip()


def title_of(name: str) -> str:
    """NAME=acme_lm -> Acme LM."""
    return " ".join(part.upper() if len(part) < 4 else part.capitalize() for part in name.split("_"))


def rules(old: str, old_title: str, new: str, new_title: str) -> Rules:
    def word(text: str, after: str = r"(?![A-Za-z0-9_])") -> re.Pattern[str]:
        return re.compile(rf"(?<![A-Za-z0-9_]){re.escape(text)}{after}")

    dashed, new_dashed = old.replace("_", "-"), new.replace("_", "-")
    return [
        (re.compile(rf'(?<=^name = "){dashed}(?="$)'), new_dashed),
        (word(dashed, r"(?=\[[a-z,]+\])"), new_dashed),
        (word(old), new),
        (word(f"{old.upper()}_", ""), f"{new.upper()}_"),
        (word(old_title, r"(?![A-Za-z0-9])"), new_title),
    ]


def renamed(text: str, replacing: Rules) -> str:
    def line(text: str) -> str:
        for pattern, new in () if KEPT_LINE.search(text) else replacing:
            text = pattern.sub(new, text)
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


def check_names(root: Path, name: str, title: str, old: str, old_title: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise Refused("not a package name; allowed: lower-case words of letters and digits joined by '_', no keyword")
    if name == old:
        raise Refused("this is the present name")
    if title != old_title and not re.fullmatch(r"[\w.-]+( [\w.-]+)*", title):
        raise Refused(f"TITLE={title}: allowed: words of letters, digits, '.', '_' and '-'")
    installed = [*root.glob(f".venv/lib/python*/site-packages/{name}"), importlib.util.find_spec(name)]
    if name in sys.stdlib_module_names or any(installed):
        raise Refused("there is a module of this name already, which it would hide")


def check_unused(new: Rules, files: dict[str, str]) -> None:
    """A name that means something else already could not be told apart from it at the next renaming."""
    for file, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            for pattern, _ in new if not KEPT_LINE.search(line) else ():
                if found := pattern.search(line):
                    raise Refused(f"{found[0]} already means something else here ({file}:{number}); choose another")


def write(root: Path, old: dict[str, str], new: dict[str, tuple[str, str]]) -> None:
    """Writes `new` (old path -> new path and text); puts everything back when something fails on the way."""
    try:
        for name, (target, text) in new.items():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            (root / name).rename(root / target)
            (root / target).write_bytes(text.encode("utf-8"))
    except BaseException:
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
    check_names(root, name, title, old, old_title)
    files = texts(root)
    check_unused(rules(name, title, "", "")[: 4 if title == old_title else 5], files)
    if git(root, "status", "--porcelain").strip() and not force:
        raise Refused("the working tree has changes; commit them first, or FORCE=1")
    replacing = rules(old, old_title, name, title)
    both = {file: (renamed(file, replacing), renamed(text, replacing)) for file, text in files.items()}
    new = {file: change for file, change in both.items() if change != (file, files[file])}
    if clash := [target for file, (target, _) in new.items() if target != file and (root / target).exists()]:
        raise Refused(f"{clash[0]} exists already")
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
