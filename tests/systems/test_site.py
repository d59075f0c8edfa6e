"""The site that `make site` builds: small, without a broken link, and without a request to another host."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup
from lab_driven import chromium_page

from ondevice.assets import ROOT

pytest.importorskip("myst_nb", reason="needs pip install -e .[site]")
LOADED = {"src", "srcset", "data", "poster", "action"}  # attributes by which a browser fetches; and a link's href
FETCHED = re.compile(r"""(?:url\(\s*|@import\s+)["']?(?:https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "source").mkdir()
    command = [sys.executable, "-m", "sphinx", "-qW", "--keep-going", "-c", ROOT / "docs", "-d", "trees"]
    made = subprocess.run([*command, "source", "site"], cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, BeautifulSoup]:
    return {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in site.rglob("*.html")}


def test_it_has_every_notebook_page_and_card_and_is_small(site, pages):
    sources = [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("docs/*.md"), *ROOT.glob("data/**/README.md")]
    made = {path.relative_to(site) for path in pages}
    assert {path.relative_to(ROOT).with_suffix(".html") for path in sources} - made == {Path("docs/index.html")}
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 25e6


def test_its_links_resolve(site, pages):
    anchors = {path: {tag["id"] for tag in page.find_all(id=True)} for path, page in pages.items()}
    broken, followed = [], 0
    for path, page in pages.items():
        for tag in page.find_all(["a", "link", "img", "script", "source"]):
            link = urlsplit(str(tag.get("href") or tag.get("src") or ""))
            if link.scheme or link.netloc:
                continue
            target = Path(os.path.normpath(path.parent / unquote(link.path))) if link.path else path
            anchor = unquote(link.fragment)
            found = target.is_file() and target.is_relative_to(site) and (not anchor or anchor in anchors[target])
            followed += 1
            if not found:
                broken.append(f"{path.relative_to(site)}: {link.geturl()}")
    assert followed > 1000 and not broken, broken


def test_it_names_no_other_host_that_a_browser_would_ask(site, pages):
    asked = []
    for path, page in pages.items():
        for tag in page.find_all(True):
            names = LOADED | ({"href"} if tag.name != "a" else set())
            asked += [f"{path.name}: {tag.name} {tag[name]}" for name in names & set(tag.attrs)
                      if re.match(r"(https?:)?//", str(tag[name]))]  # fmt: skip
            text = tag.get("style", "") if tag.name != "style" else tag.string
            asked += [f"{path.name}: {text}"] if FETCHED.search(str(text)) else []
    asked += [path.name for path in site.rglob("*.css") if FETCHED.search(path.read_text(encoding="utf-8"))]
    assert not asked


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(site) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)], ids=["phone", "desktop"])
def test_a_browser_stays_on_the_host_and_never_scrolls_the_page_sideways(site, pages, address, width, height, tmp_path):
    """Every page, in headless Chromium."""
    asked, wide, errors = set(), {}, []
    with chromium_page(tmp_path / "chromium") as page:
        page.set_viewport_size({"width": width, "height": height})
        page.on("request", lambda request: asked.add(request.url))
        page.on("response", lambda answer: errors.append(answer.url) if answer.status >= 400 else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        for path in pages:
            name = path.relative_to(site).as_posix()
            page.goto(address + name, wait_until="load")
            wide[name] = page.evaluate("document.documentElement.scrollWidth") - width
    assert len(asked) > len(pages) and not errors
    assert {url for url in asked if not url.startswith((address, "data:", "blob:"))} == set()
    assert {name: pixels for name, pixels in wide.items() if pixels > 0} == {}
