"""Sphinx's configuration of the site (`make site`): README, notebooks as they are stored, cards, pages of this folder.

The pages are gathered in a tree laid out like the repository, so that their relative links hold. Nothing on the site
comes from another host: formulas are MathML, which browsers draw themselves, in a font that comes along.
"""

import html
import os
import re
import shutil
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import nbformat
import ziamath
from docutils import nodes
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "docs/*.md", "notebooks/*.ipynb", "data/*/README.md", "data/models/*/README.md")
LINK = re.compile(r"\[([^]]*)]\((?!\w+:|#)([^)#\s]+)(?:#([^)\s]*))?\)")
RAW_LINK = re.compile(r'href="(?!\w+:)([^"#]*)\.(?:ipynb|md)(?:#([^"]*))?"')

project, author = "On-device LLM inference, reproduced", "The ondevice maintainers"
html_title = project
extensions = ["myst_nb", "sphinx.ext.autodoc"]
html_theme, html_css_files = "furo", ["site.css"]
html_static_path = ["_static", str(Path(ziamath.__file__).parent / "fonts/STIXTwoMath-Regular.ttf")]
html_copy_source = html_show_copyright = html_show_sphinx = False
html_math_renderer = "mathml"
exclude_patterns = ["README.md"]  # index.md has it
highlight_language, default_role = "none", "code"
autodoc_member_order, autodoc_typehints = "bysource", "signature"
python_maximum_signature_line_length = 88
nb_execution_mode, nb_render_markdown_format = "off", "myst"
nb_ipywidgets_js = {}  # a widget is shown by the figure that is stored beside it, without scripts of another host
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
myst_enable_extensions, myst_heading_anchors = ["dollarmath"], 4
# Notebooks begin sections a level deeper than the last one; outputs have code in languages that nobody highlights.
suppress_warnings = ["myst.header", "misc.highlighting_failure"]


def slug(text):
    """A heading's anchor, as on GitHub; JupyterLab's, which keeps capitals and punctuation, becomes the same."""
    return re.sub(r"[^\w-]", "", text.lower().replace(" ", "-"))


def gather(source):
    """Lay the pages, and the files that they link to, below `source`."""
    shutil.rmtree(source, ignore_errors=True)
    pages = {path for pattern in PAGES for path in ROOT.glob(pattern)} - {ROOT / "docs/index.md"}
    for path in pages:
        follow = partial(LINK.sub, partial(_followed, path.parent, pages, source))
        if path.suffix == ".ipynb":
            notebook = nbformat.read(path, as_version=4)
            for cell in notebook.cells:
                if cell.cell_type == "markdown":
                    cell.source = follow(cell.source)
                elif cell.metadata.get("jupyter", {}).get("source_hidden"):  # folded in JupyterLab, so here, too
                    cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]
            text = nbformat.writes(notebook)
        else:
            text = follow(path.read_text(encoding="utf-8"))
        _place(path, source, text)
    shutil.copy2(ROOT / "docs/index.md", source)


def _followed(folder, pages, source, match):
    """A link as the site has it: a folder's is to its README or none, a file's takes the file along."""
    text, target, anchor = match.groups()
    path = Path(os.path.normpath(folder / unquote(target)))
    if path.is_dir():
        path, target = path / "README.md", f"{target.rstrip('/')}/README.md"
        if path not in pages:
            return text
    if path == ROOT / "README.md":
        target = f"{target.removesuffix('README.md')}index.md"
    elif path not in pages and path.is_file() and path.is_relative_to(ROOT):
        _place(path, source)
    return f"[{text}]({target}{_anchor(anchor or '')})"


def _anchor(given):
    return f"#{slug(unquote(given))}" if given else ""


def _place(path, source, text=None):
    """Copy a file of the repository, or write its changed text."""
    placed = source / path.relative_to(ROOT)
    placed.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, placed)
    if text is not None:
        placed.write_text(text, encoding="utf-8")


def anchored(app, doctree):
    """Give each section its slug as an anchor, and have links in a cell's HTML lead to pages of the site."""
    for section in doctree.findall(nodes.section):
        if (name := slug(section[0].astext())) not in doctree.ids:
            section["ids"].append(name)
            doctree.ids[name] = section
    for raw in list(doctree.findall(nodes.raw)):
        made = RAW_LINK.sub(lambda link: f'href="{link[1]}.html{_anchor(html.unescape(link[2] or ""))}"', raw.astext())
        raw.children, raw.rawsource = [nodes.Text(made)], made


def as_text(app, what, name, thing, options, lines):
    """Docstrings here are plain text: signs of reStructuredText stand for themselves, and so does what is indented."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip())
    made = []
    for block in blocks:
        if all(line.startswith("    ") for line in block.splitlines()):
            made += ["::", "", *block.splitlines(), ""]
            continue
        for line in block.splitlines():
            line = re.sub(r"(`[^`]*`)|([\\*|_])", lambda sign: sign[1] or f"\\{sign[2]}", line)
            if re.match(r"[a-z]\w*(, \w+)*( \([^)]*\))?: |Raises ", line):  # a parameter begins a paragraph
                made.append("")
            made.append(line.strip())
        made.append("")
    lines[:] = made


def _math(display, writer, node):
    writer.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app):
    """Gather the pages before Sphinx looks for them."""
    gather(Path(app.srcdir))
    app.add_html_math_renderer("mathml", (partial(_math, "inline"), None), (partial(_math, "block"), None))
    app.connect("doctree-read", anchored)
    app.connect("autodoc-process-docstring", as_text)
