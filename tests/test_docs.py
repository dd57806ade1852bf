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
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_code_and_the_results_say(generator: ModuleType) -> None:
    assert generator.drifted(ROOT) == [], "run: python docs/generate.py"


def test_drift_is_found(generator: ModuleType, tmp_path: Path) -> None:
    generator.write(tmp_path)
    assert generator.drifted(tmp_path) == []
    for name, was, becomes in (
        ("docs/reference/reasons.md", "queued", "qeued"),
        ("README.md", " s, no step done again", " s, 3 steps done again"),
    ):
        page = tmp_path / name
        assert was in page.read_text()
        page.write_text(page.read_text().replace(was, becomes))
    (tmp_path / "docs" / "ledger.md").unlink()
    assert generator.drifted(tmp_path) == ["docs/reference/reasons.md", "docs/ledger.md", "README.md"]


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        ([0, 0], "no step"),
        ([0, 1, 0], "0 or 1 step"),
        ([1], "1 step"),
        ([4, 4, 3], "3 or 4 steps"),
        ([8, 6], "6 to 8 steps"),
    ],
)
def test_a_count_in_words(generator: ModuleType, steps: list[int], want: str) -> None:
    assert generator.how_many(steps) == want


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
