"""Reports of PyTorch's functions: values, and a page with all graphs."""

import json
import re

import pytest

import pbkern
from pbkern.core.errors import OptionError
from tests.api.test_report_page import Opened, browser, needs_chromium, values_of  # noqa: F401

torch = pytest.importorskip("torch")


def graphs_of(document):
    text = re.search(r'<script type="application/json" id="graphs">(.*?)</script>', document, re.S)[
        1
    ]
    return json.loads(text)


@pytest.fixture(scope="module")
def explanation():
    """The report of a function of two graphs, of which one has operators that run in Torch, with their gradients."""

    def two_graphs(x, w):
        y = torch.softmax(x @ w, 1)
        torch._dynamo.graph_break()
        return (y.cumsum(0) @ torch.linalg.eigvals(y).real).sum() + y.square().sum()

    f = pbkern.polyblocks_jit_torch(two_graphs)
    x, w = torch.randn(32, 32), torch.randn(32, 32, requires_grad=True)
    f(x, w).backward()
    return f.explain(x, w)


def test_values_are_those_of_the_graphs(explanation):
    values = explanation.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["name"] == "two_graphs"
    assert values["notes"] == []
    assert len(values["graphs"]) == len(explanation.graphs)
    for graph, given in zip(values["graphs"], explanation.graphs):
        assert (graph["number"], graph["kind"]) == (given.number, given.kind)
        assert graph["in_torch"] == list(given.in_torch)
        kernels = [kernel["name"] for part in graph["parts"] for kernel in part["kernels"]]
        assert sorted(kernels) == sorted(kernel.name for kernel in given.kernels())
        left = [one["operation"] for part in graph["parts"] for one in part["left_to_xla"]]
        assert left == [one.op for one in given.left_to_xla()]
        assert all(part["seconds"] > 0 for part in graph["parts"] if part["kernels"])
    assert any(graph["in_torch"] for graph in values["graphs"])
    assert {graph["kind"] for graph in values["graphs"]} >= {"forward", "backward"}


def test_a_page_has_the_parts_of_all_graphs(explanation):
    document = explanation.html(stages=["kernels"])
    reports, overview = values_of(document), graphs_of(document)
    parts = [part for graph in explanation.as_dict()["graphs"] for part in graph["parts"]]
    assert [report["name"] for report in reports] == [part["name"] for part in parts]
    numbers = [number for graph in overview["graphs"] for number in graph["parts"]]
    assert numbers == list(range(len(reports)))
    assert all("@pbkern.kernel" in k["texts"]["kernels"] for r in reports for k in r["kernels"])
    assert "<title>two_graphs - pbkern</title>" in document
    with pytest.raises(OptionError, match="there is no stage `sass`"):
        explanation.html(stages=["sass"])


def test_notebooks_show_the_page(explanation):
    fragment = explanation._repr_html_()
    assert fragment.startswith("<iframe srcdoc=")
    assert "&lt;title&gt;two_graphs" in fragment


def test_a_module_and_a_graph_that_is_not_chosen():
    model = pbkern.polyblocks_jit_torch(torch.nn.Linear(8, 4))
    assert model.explain(torch.ones(2, 8)).as_dict()["name"] == "Linear"
    options = {"torch_polyblocks_filter_graphs": [0]}
    f = pbkern.polyblocks_jit_torch(lambda x: x + 1, compile_options=options)
    (graph,) = f.explain(torch.ones(2)).as_dict()["graphs"]
    assert graph["parts"] == []
    assert graph["in_torch"] == ["all of it: the graph was not chosen"]
    assert values_of(f.explain(torch.ones(2)).html()) == []


@needs_chromium
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_opens(browser, explanation, tmp_path, width):  # noqa: F811
    path = tmp_path / "graphs.html"
    path.write_text(explanation.html(stages=["kernels"]), encoding="utf-8")
    opened = Opened(browser, path, width)
    text = opened.text()
    for graph in explanation.graphs:
        assert f"graph {graph.number}, {graph.kind}" in text
        assert all(what in text for what in graph.in_torch)
    parts = [part for graph in explanation.as_dict()["graphs"] for part in graph["parts"]]
    links = opened.script("return [...document.querySelectorAll('.overview a')].map((a) => a.hash)")
    assert links == [f"#report-{n}" for n in range(len(parts))]
    for n, part in enumerate(parts):
        heading = opened.script(f"return document.querySelector('#report-{n} h1').textContent")
        assert heading == part["name"]
    tops = opened.script(
        "return [...document.querySelectorAll('.report')].map((r) => r.getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
    assert len(set(tops)) == len(parts)
    opened.click("#report-1 .kernels tr[data-kernel] button")
    chosen = "return [...document.querySelectorAll('.report')].map((r) => r.querySelectorAll('.chosen').length)"
    marks = opened.script(chosen)
    assert marks[1] > 0
    assert marks[0] == 0
