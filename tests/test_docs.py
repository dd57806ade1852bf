"""The reference pages say what the code says, and every link between the documents leads somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import tidy
from tidy import Source

ROOT = Path(__file__).parents[1]
README_LINES_MAX = 120
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
# Documents are written by hand except those below docs/reference and docs/ledger.md.
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says(generator: ModuleType) -> None:
    assert generator.drifted(ROOT / "docs") == [], "run: python docs/generate.py"


def test_drift_is_found(generator: ModuleType, tmp_path: Path) -> None:
    generator.write(tmp_path)
    assert generator.drifted(tmp_path) == []
    page = tmp_path / "reference" / "reasons.md"
    page.write_text(page.read_text().replace("queued", "qeued"))
    (tmp_path / "ledger.md").unlink()
    assert generator.drifted(tmp_path) == ["reference/reasons.md", "ledger.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = [found[1] for found in LINK.finditer(document.read_text(encoding="utf-8"))]
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_use_plain_punctuation(document: Path) -> None:
    source = Source(str(document.relative_to(ROOT)), "", document.read_text(encoding="utf-8"))
    assert [*tidy.typographic(source), *tidy.unfinished(source)] == []


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") < README_LINES_MAX
