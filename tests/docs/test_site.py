"""The documentation site: built strictly, whole, and asking nobody else for anything."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mkdocs", reason="the docs extra is not installed")
ROOT = Path(__file__).resolve().parents[2]


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin", "HOME": str(project)}
    return subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("mkdocs.yml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def site(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(project, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Addresses(HTMLParser):
    """What a browser fetches on its own to show a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        fetched = given.get("src") or (given.get("href") if tag == "link" else None)
        self.found += [fetched] if fetched else []


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    addresses = [address for page in pages for address in Addresses(page.read_text()).found]
    assert addresses
    assert not [address for address in addresses if re.match(r"(https?:)?//", address)]
    assert not [file.name for file in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", file.read_text())]
    assert Addresses('<link href="https://example.org/x.css"><script src="//a.b/c.js">').found[0].startswith("https:")


def test_every_page_is_in_the_menu_once(project: Path) -> None:
    menu = [next(iter(item.items())) for item in yaml.safe_load((project / "mkdocs.yml").read_text())["nav"]]
    listed = [page for _, pages in menu for page in ([pages] if isinstance(pages, str) else pages)]
    assert sorted(listed) == sorted(
        file.relative_to(project / "docs").as_posix() for file in (project / "docs").rglob("*.md")
    )


def test_the_readmes_parts_and_titled_fences_are_shown(site: Path) -> None:
    front = re.sub(r"<[^>]+>", "", (site / "index.html").read_text())
    assert "make train" in front
    assert "What you can rely on" in front
    assert "8&lt;" not in front
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "```" not in text, page


def test_a_dead_link_ends_the_build(project: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(project, tmp_path / "broken")
    with (broken / "docs" / "docker.md").open("a") as page:
        page.write("\n[nowhere](no-such-page.md)\n")
    done = build(broken, tmp_path / "site")
    assert done.returncode != 0
    assert "no-such-page.md" in done.stdout + done.stderr
